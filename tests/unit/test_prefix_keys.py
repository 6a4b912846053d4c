"""Names of prefixes: what parts them, and that a version names the same prefix for ever."""

from __future__ import annotations

from itertools import combinations

from specray.prefix_keys import root_key, unit_key


def test_every_field_of_the_root_parts_prefixes_and_none_is_taken_for_another() -> None:
    roots = [
        root_key(),
        root_key("a"),
        root_key("ab"),
        root_key(adapter=b"a"),
        root_key("a", adapter=b"b"),
        root_key(cache_format="a"),
        root_key(adapter=b"a", cache_format="b"),
        root_key("a", cache_format="b"),
    ]
    assert all(first != second for first, second in combinations(roots, 2))


def test_a_version_names_the_same_prefix_in_every_process_for_ever() -> None:
    """Whoever changes what goes into a root gives it another version."""
    key = unit_key(root_key("salt", adapter=bytes(32), cache_format="int8"), range(16))
    assert key.hex() == "69f2fde5936c846407a8cf37b72516d84cfdd5edfeaab33f2dbfe51679215535"
