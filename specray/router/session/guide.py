"""What an output's grammar says of the draft tokens that are to follow it."""

from __future__ import annotations

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.interfaces import OutputGrammar


class Guide:
    """Guides what is drafted for one session; without a grammar it changes nothing."""

    def __init__(self, committed: list[int], num_prompt_tokens: int) -> None:
        self.grammar: OutputGrammar | None = None
        """Grammar of the output; None: it has none, or it is not compiled yet."""
        self._committed = committed
        self._num_prompt_tokens = num_prompt_tokens

    def forced(self, limit: int) -> DraftTokens:
        """Tokens, at most ``limit``, about which the grammar leaves no choice."""
        if self.grammar is None:
            return NO_DRAFT
        return DraftTokens(self.grammar.forced(self._output_ids, limit))

    def without_illegal(self, drafted: DraftTokens) -> DraftTokens:
        """Draft tokens up to the first that the grammar forbids.

        That one stays where it was sampled for rejection verification: what follows its rejection is drawn
        from the target's residual, and not from its whole distribution as where a chain ends. Trees are left
        to the target.
        """
        if self.grammar is None or not drafted.token_ids or not drafted.is_chain:
            return drafted
        num_legal = self.grammar.count_legal(self._output_ids, drafted.token_ids)
        return drafted.first(num_legal + bool(drafted.probs))

    @property
    def _output_ids(self) -> list[int]:
        return self._committed[self._num_prompt_tokens :]
