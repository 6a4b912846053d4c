"""Names computed prefixes: keys that are equal exactly where the K/V of a prefix are.

A sequence is cut into units; a unit's key is BLAKE2b-256 of the key before it and its own token ids,
so equal keys mean equal tokens from the first one on. Before the first unit stands the root key. Everything
else that makes K/V of the same tokens differ goes into the root, and nowhere else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

UNIT_TOKENS: Final = 16
"""Most tokens of a unit."""
SNAPSHOT_TOKENS: Final = 64
"""Tokens between the places where recurrent layers may have a snapshot, and prompts can be cut."""
_KEY_BYTES: Final = 32
_ROOT_VERSION: Final = b"specray root 1"
"""Name of the root's fields and their order; another field makes another version."""


def root_key(cache_salt: str = "", *, adapter: bytes = b"", cache_format: str = "") -> bytes:
    """The key before the first unit of a sequence: equal for those that may share units.

    It is hashed apart from units: no salt that somebody chooses is the key of another's prefix.

    Args:
        cache_salt: text of the request's choice.
        adapter: digest of the adapter that the model's weights are changed by; empty: the base.
        cache_format: format of K/V that is not the model's own dtype; empty: it is.
    """
    digest = blake2b(digest_size=_KEY_BYTES, person=_ROOT_VERSION)
    for field in (cache_salt.encode(), adapter, cache_format.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def unit_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a unit of tokens after ``parent``, the key of the unit before it or the root."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=_KEY_BYTES).digest()


def short_keys(root: bytes, token_ids: Sequence[int], most: int) -> list[int]:
    """The first 64 bits of the keys of up to ``most`` whole units, for those who may be wrong at times."""
    keys, parent, data = [], root, array("i", token_ids).tobytes()
    num_bytes = 4 * UNIT_TOKENS
    for start in range(0, min(most, len(token_ids) // UNIT_TOKENS) * num_bytes, num_bytes):
        parent = blake2b(parent + data[start : start + num_bytes], digest_size=_KEY_BYTES).digest()
        keys.append(int.from_bytes(parent[:8], "little"))
    return keys
