"""Units of prefixes: what counts as the same prefix, and who holds it."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.engine.cache.prefix import PrefixIndex
from specray.prefix_keys import root_key


def keys_of(index: PrefixIndex, token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    for _ in range(index.num_units(len(token_ids))):
        keys.append(index.next_key(keys, token_ids))
    return keys


def test_salts_part_equal_prefixes() -> None:
    index, tokens = PrefixIndex(16), list(range(32))
    firsts = {index.next_key([], tokens, root_key(salt)) for salt in ("", "a", "b")}
    assert len(firsts) == 3
    assert index.next_key([], tokens, root_key("")) == index.next_key([], tokens)
    # A salt that is spelled like the tokens of somebody's unit is not its key.
    own = index.next_key([], tokens)
    spelled = array("i", tokens[:16]).tobytes().decode()
    assert index.next_key([own], tokens) != index.next_key(
        [], [*tokens[16:], *tokens[16:]], root_key(spelled)
    )
    assert root_key(spelled) != own


@pytest.mark.parametrize(
    ("block_size", "ends"),
    [
        (16, [16, 32, 48, 64]),
        (64, [16, 32, 48, 64]),
        (40, [16, 32, 40, 56, 72, 80]),
        (4, [4, 8, 12]),
        (1, [1, 2, 3]),
    ],
)
def test_units_have_sixteen_tokens_and_end_with_their_block(block_size: int, ends: list[int]) -> None:
    index = PrefixIndex(block_size)
    assert [index.end_of(count) for count in range(len(ends) + 1)] == [0, *ends]


@given(st.integers(1, 100), st.integers(0, 500))
def test_num_units_is_the_inverse_of_end_of(block_size: int, num_tokens: int) -> None:
    index = PrefixIndex(block_size)
    count = index.num_units(num_tokens)
    assert index.end_of(count) <= num_tokens < index.end_of(count + 1)


def test_equal_units_after_different_prefixes_are_different() -> None:
    index = PrefixIndex(16)
    shared = list(range(100, 116))
    first, second = keys_of(index, [1] * 16 + shared), keys_of(index, [2] * 16 + shared)
    assert first[1] != second[1]
    assert first == keys_of(index, [1] * 16 + shared)


def test_tokens_do_not_run_together() -> None:
    """Neighbours keep their place: the same digits cut otherwise are other tokens."""
    index = PrefixIndex(2)
    assert keys_of(index, [1, 23]) != keys_of(index, [12, 3])
    assert keys_of(index, [1, 256]) != keys_of(index, [256, 1])


def test_a_unit_lives_as_long_as_one_of_its_holders() -> None:
    index = PrefixIndex(32)
    first, second = keys_of(index, list(range(32)))
    for block_id, keys in ((5, [first, second]), (7, [first])):
        for key in keys:
            index.add(block_id, key)
    assert (index.holder(first), index.holder(second)) == (5, 5)
    index.truncate(5, 0)
    assert (index.holder(first), index.holder(second)) == (7, None)
    index.truncate(7, 1)
    assert index.holder(first) == 7
    index.truncate(7, 0)
    assert index.holder(first) is None
    index.check_integrity()


def test_integrity_sees_a_holder_that_holds_nothing() -> None:
    index = PrefixIndex(16)
    [key] = keys_of(index, list(range(16)))
    index.add(3, key)
    index._holders[key].append(4)
    with pytest.raises(AssertionError, match="holders differ"):
        index.check_integrity()


def test_integrity_sees_more_units_than_fit() -> None:
    index = PrefixIndex(16)
    rng = random.Random(0)
    for _ in range(2):
        index.add(0, rng.randbytes(32))
    with pytest.raises(AssertionError):
        index.check_integrity()
