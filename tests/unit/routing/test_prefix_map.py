"""The map of prefixes follows caches that forget what was used the longest time ago."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specray.prefix_keys import UNIT_TOKENS, root_key, short_keys, unit_key
from specray.routing.prefix_map import PrefixMap


def _keys(*tokens: int, salt: str = "") -> list[int]:
    """Keys of units that each hold one token 16 times."""
    return short_keys(root_key(salt), [token for token in tokens for _ in range(UNIT_TOKENS)], 512)


def test_short_keys_are_the_starts_of_the_caches_own_keys() -> None:
    first = unit_key(root_key("salt"), range(16))
    second = unit_key(first, range(16, 32))
    expected = [int.from_bytes(key[:8], "little") for key in (first, second)]
    assert short_keys(root_key("salt"), range(40), 512) == expected
    assert short_keys(root_key("salt"), range(40), 1) == expected[:1]


def test_a_prefix_is_found_as_far_as_it_is_the_same() -> None:
    units = PrefixMap()
    units.use("a", _keys(1, 2, 3))
    units.use("b", _keys(1))
    assert [units.match(router, _keys(1, 2, 4)) for router in "abc"] == [2, 1, 0]
    assert units.match("a", _keys(2, 3)) == 0
    assert units.match("a", []) == 0


def test_another_salt_is_another_prefix() -> None:
    units = PrefixMap()
    units.use("a", _keys(1, 2, salt="x"))
    assert units.match("a", _keys(1, 2, salt="y")) == 0


def test_what_was_used_longest_ago_goes_first_and_ends_go_before_starts() -> None:
    units = PrefixMap(max_units=6)
    units.use("a", _keys(1, 2, 3))
    units.use("a", _keys(4, 5, 6))
    units.use("a", _keys(1))
    units.use("a", _keys(7))
    assert units.match("a", _keys(1, 2, 3)) == 2
    assert units.match("a", _keys(4, 5, 6)) == 3
    assert units.match("a", _keys(7)) == 1


def test_a_router_keeps_no_more_than_its_cache_or_its_share() -> None:
    units = PrefixMap(max_units=8)
    units.set_capacity("a", 2)
    units.use("a", _keys(1, 2, 3))
    units.use("b", _keys(1, 2, 3, 4, 5))
    assert [units.match(router, _keys(1, 2, 3, 4, 5)) for router in "ab"] == [2, 4]


def test_a_missing_unit_takes_everything_older_with_it() -> None:
    units = PrefixMap()
    units.use("a", _keys(1))
    units.use("a", _keys(2, 3))
    units.use("a", _keys(4))
    units.forget_until("a", units.last_use("a", _keys(2, 3)[1]))
    assert [units.match("a", _keys(*chain)) for chain in ((1,), (2, 3), (4,))] == [0, 0, 1]
    units.forget_until("b", 100)


def test_a_router_that_is_gone_leaves_nothing() -> None:
    units = PrefixMap()
    units.use("a", _keys(1, 2))
    units.drop("a")
    assert len(units) == 0 and units.match("a", _keys(1, 2)) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=30))
def test_the_longest_match_of_a_full_map_is_that_of_a_search(chains: list[list[int]]) -> None:
    units = PrefixMap(max_units=9)
    for chain in chains:
        keys = _keys(*chain)
        units.use("a", keys)
        assert len(units) <= 9
        held = [units.match("a", keys[:size]) == size for size in range(1, len(keys) + 1)]
        # What is held is a start of the chain.
        assert held == sorted(held, reverse=True)
        assert units.match("a", keys) == sum(held)
