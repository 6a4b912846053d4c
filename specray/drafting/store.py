"""Bounded stores of past outputs, one per tenant, for the suffix proposer.

A suffix automaton cannot remove texts, so a store has two generations. The younger one takes new outputs;
when it holds half of all tokens, the older one is dropped and the younger takes its place. If a proposal uses
an output of the older one, that output is added to the younger one again. So whole outputs are evicted, least
recently used first, at no cost at that moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from specray.drafting.suffix_index import SuffixIndex


class _Generation:
    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.outputs: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        """Start of each output, in tokens of all outputs before it."""


class OutputStore:
    """Counts over past outputs of at most ``max_tokens`` tokens.

    Args:
        max_tokens: maximum tokens of all kept outputs, >= 2. Of an output longer than half, the end is kept.
    """

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 2, max_tokens
        self._half = max_tokens // 2
        self._young = _Generation()
        self._old = _Generation()

    @property
    def num_tokens(self) -> int:
        return self._young.index.num_tokens + self._old.index.num_tokens

    @property
    def generations(self) -> tuple[SuffixIndex, SuffixIndex]:
        """Indexes to search: the younger one first."""
        return self._young.index, self._old.index

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a whole output."""
        output = tuple(token_ids[-self._half :])
        if not output:
            return
        if self._young.index.num_tokens + len(output) > self._half:
            self._old, self._young = self._young, _Generation()
        young = self._young
        young.outputs.append(output)
        young.starts.append(young.index.num_tokens)
        young.index.begin_text()
        for token_id in output:
            young.index.append(token_id)

    def touch(self, used: SuffixIndex, end: Sequence[int], path: Sequence[int]) -> None:
        """Marks the output that a proposal comes from as recently used.

        Args:
            used: the one of ``generations`` that the proposal was taken from.
            end: the session's last tokens.
            path: tokens proposed after them; not empty.
        """
        old = self._old
        if used is not old.index:
            return
        match = used.find([*end, *path])
        if match is None:
            return
        number = bisect_right(old.starts, used.latest(match.state) - 1) - 1
        output, old.outputs[number] = old.outputs[number], ()
        self.add(output)


class OutputStores:
    """One store per tenant; the least recently served tenant is evicted first.

    Args:
        max_tokens: maximum tokens per tenant; 0: nothing is kept.
        max_tenants: maximum tenants, >= 1.
    """

    def __init__(self, max_tokens: int, *, max_tenants: int = 64) -> None:
        self._max_tokens = max_tokens
        self._max_tenants = max_tenants
        self._stores: OrderedDict[str, OutputStore] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def of(self, tenant: str) -> OutputStore | None:
        """Returns the tenant's store; None for requests without a tenant, or if nothing is kept."""
        if not tenant or self._max_tokens < 2:
            return None
        store = self._stores.pop(tenant, None) or OutputStore(self._max_tokens)
        self._stores[tenant] = store
        if len(self._stores) > self._max_tenants:
            self._stores.popitem(last=False)
        return store
