"""Past outputs of one tenant, bounded: whole outputs come and go.

An automaton cannot forget, so there are two: the younger one takes new outputs, and when it has half of all
tokens, the older one is dropped as a whole and the younger takes its place. An output of the older one that a
proposal is taken from is added to the younger one again. So what goes are always whole outputs that were not
used for the longest time, at no cost at that moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from specray.drafting.suffix_index import SuffixIndex

MAX_TENANTS = 64


class _Generation:
    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.outputs: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        """Tokens of all outputs before each."""


class OutputStore:
    """Counts over past outputs of at most ``max_tokens`` tokens.

    Args:
        max_tokens: of all outputs that are kept, >= 2. An output longer than half of it is cut to its end.
    """

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 2, max_tokens
        self._half = max_tokens // 2
        self._young = _Generation()
        self._old = _Generation()

    @property
    def num_tokens(self) -> int:
        """Kept now."""
        return self._young.index.num_tokens + self._old.index.num_tokens

    @property
    def generations(self) -> tuple[SuffixIndex, SuffixIndex]:
        """Where to look: the younger outputs first."""
        return self._young.index, self._old.index

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes a whole output."""
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
        """A proposal was taken from ``used``: the output that it comes from counts as new.

        Args:
            used: one of ``generations``.
            end: the session's last tokens.
            path: what was proposed after them; not empty.
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
    """One store per tenant; the tenant that was not served for the longest time goes first.

    Args:
        max_tokens: per tenant; 0: nothing is kept for anybody.
        max_tenants: kept at once, >= 1.
    """

    def __init__(self, max_tokens: int, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tokens = max_tokens
        self._max_tenants = max_tenants
        self._stores: OrderedDict[str, OutputStore] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stores)

    def of(self, tenant: str) -> OutputStore | None:
        """The tenant's store; None for requests that name no tenant, and where nothing is kept."""
        if not tenant or self._max_tokens < 2:
            return None
        store = self._stores.pop(tenant, None) or OutputStore(self._max_tokens)
        self._stores[tenant] = store
        if len(self._stores) > self._max_tenants:
            self._stores.popitem(last=False)
        return store
