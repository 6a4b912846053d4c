"""Which Router holds which prefixes in its cache, as far as one Ingress has seen.

A prefix is a chain of units of 16 tokens, each named by a key that names all units before it
(:mod:`specray.prefix_keys`). So one table of keys for each Router is enough, and there is no tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Final

MAX_UNITS: Final = 100_000
"""Units of all Routers together that are remembered: about 15 MB, or 1.6 million tokens."""


class PrefixMap:
    """The units of each Router in the order of their last use, which is the order in which caches forget.

    A chain is used from its end to its start, so a unit is never older than those that follow it, and
    the units of a chain that are known are its first ones.

    Args:
        max_units: units remembered of all Routers together, >= 1; each has an equal share of them.
    """

    def __init__(self, max_units: int = MAX_UNITS) -> None:
        self._max_units = max_units
        self._uses: dict[str, dict[int, int]] = {}
        """Units of each Router and their last use, the oldest first."""
        self._capacities: dict[str, int] = {}
        self._num_uses = 0

    def __len__(self) -> int:
        return sum(map(len, self._uses.values()))

    def set_capacity(self, router: str, num_units: int) -> None:
        """The Router's cache holds ``num_units`` units, >= 0."""
        self._capacities[router] = num_units

    def match(self, router: str, keys: Sequence[int]) -> int:
        """Units at the start of the chain that the Router holds."""
        uses = self._uses.get(router)
        if not uses or not keys or keys[0] not in uses:
            return 0
        return bisect_left(keys, True, lo=1, key=lambda key: key not in uses)

    def last_use(self, router: str, key: int) -> int:
        """Number of the unit's last use by the Router, which holds it."""
        return self._uses[router][key]

    def use(self, router: str, keys: Sequence[int]) -> None:
        """The Router has computed or found the units of the chain."""
        uses = self._uses.setdefault(router, {})
        self._num_uses += 1
        for key in reversed(keys):
            uses.pop(key, None)
            uses[key] = self._num_uses
        limit = min(self._max_units // len(self._uses), self._capacities.get(router, self._max_units))
        if len(uses) > limit:
            # An eighth at a time: the front of a dict is walked anew for each removal.
            for key in list(islice(uses, len(uses) - limit + limit // 8)):
                del uses[key]

    def forget_until(self, router: str, use: int) -> None:
        """A unit last used at ``use`` is gone from the Router's cache, and with it all that are older."""
        uses = self._uses.get(router, {})
        for key in list(takewhile(lambda key: uses[key] <= use, uses)):
            del uses[key]

    def drop(self, router: str) -> None:
        """The Router is gone."""
        self._uses.pop(router, None)
        self._capacities.pop(router, None)
