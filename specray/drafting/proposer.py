"""Protocol of model-free proposers, and their factory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting.ngram import NgramProposer
from specray.drafting.store import OutputStore
from specray.drafting.suffix import SuffixProposer
from specray.types import DraftKind


class SessionProposer(Protocol):
    """Proposes continuations of one session's tokens. Synchronous; microseconds per token and call."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens given so far."""
        ...

    @property
    def match_len(self) -> int:
        """Length in tokens of the match that proposals follow, counted at least up to LONG_MATCH_LEN."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the session's next committed tokens: the prompt first, then verified ones."""
        ...

    def propose(self, k: int, num_nodes: int = 0) -> DraftTokens:
        """Draft tokens to follow the given ones; none: no match.

        Args:
            k: most tokens of a path.
            num_nodes: most nodes of a tree. Its first chain is the chain that is proposed without one; with
                no more nodes than that has, there are none but its own.
        """
        ...


class NoProposer:
    """A SessionProposer that proposes nothing, for sessions whose grammar alone drafts for them."""

    match_len = 0
    num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """See SessionProposer."""

    def propose(self, k: int, num_nodes: int = 0) -> DraftTokens:
        return NO_DRAFT


def make_proposer(kind: DraftKind | None, store: OutputStore | None = None) -> SessionProposer:
    """Makes a proposer for a new session.

    Args:
        kind: kind of draft without a model; None: it proposes nothing.
        store: past outputs to propose from; only ``suffix`` uses them.
    """
    assert kind is not DraftKind.MODEL
    if kind is None:
        return NoProposer()
    if kind is DraftKind.LOOKAHEAD:
        return LookaheadProposer()
    return NgramProposer() if kind is DraftKind.NGRAM else SuffixProposer(store=store)


class LookaheadProposer:
    """Implements ``SessionProposer`` for lookahead decoding, whose window and n-grams the target keeps."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Number of tokens given so far."""
        self._offered = NO_DRAFT
        self._offered_at = 0

    @property
    def match_len(self) -> int:
        """See SessionProposer: one token, the n-grams' first, if there are any."""
        return 1 if self._offered and self._offered_at == self.num_tokens else 0

    def offer(self, draft: DraftTokens, num_tokens: int) -> None:
        """Takes what the target offers to follow the first ``num_tokens``."""
        self._offered, self._offered_at = draft, num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)

    def propose(self, k: int, num_nodes: int = 0) -> DraftTokens:
        """See SessionProposer; a tree whatever ``num_nodes``, since n-grams are few for their window."""
        return self._offered.within(k) if self.match_len and k > 0 else NO_DRAFT
