"""Proposer of what the target itself has found by looking ahead: it passes on what came with the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from specray.draft_tokens import NO_DRAFT, DraftTokens


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
