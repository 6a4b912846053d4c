"""Prefixes in a simulation: what a simulated target finds of a prompt, and who chooses the Router by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specray.engine_info import EngineInfo
from specray.planning.simulation.busy import Held
from specray.prefix_keys import SNAPSHOT_TOKENS, UNIT_TOKENS, root_key, short_keys
from specray.routing import PrefixMap
from specray.types import VerifyItem

_ANY: Final = 1 << 20
_MAX_UNITS: Final = 1 << 16


class PrefixCache:
    """What the cache of one simulated target holds: the least recently used prefix goes first."""

    def __init__(self, info: EngineInfo) -> None:
        self._step = SNAPSHOT_TOKENS if info.num_snapshots else UNIT_TOKENS
        """Tokens between the places up to which something is found."""
        num_units = info.num_blocks * info.block_size // UNIT_TOKENS
        self._map = PrefixMap(max_units=num_units or _ANY)

    def take(self, held: Held, item: VerifyItem) -> int:
        """Notes the item's tokens, and returns how many of them are found and need not be computed."""
        if item.base_len == 0:
            held.finds = True
        del held.token_ids[item.base_len :]
        held.token_ids.extend(item.token_ids)
        if not held.finds:
            return 0
        # The last token of a prompt is computed, for its logits.
        keys = _keys(held.token_ids[: len(held.token_ids) - item.sample])
        length = self._map.match("", keys) * UNIT_TOKENS
        num_found = max(0, length // self._step * self._step - item.base_len)
        held.finds = num_found == len(item.token_ids)
        return num_found

    def keep(self, held: Held) -> None:
        """The sequence's tokens are computed: others may find them."""
        self._map.use("", _keys(held.token_ids))


def _keys(token_ids: Sequence[int]) -> list[int]:
    return short_keys(root_key(), token_ids, _MAX_UNITS)
