"""One request's grammar as a router sees it: which draft tokens are legal, and which tokens are forced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from specray.errors import SpecrayError
from specray.grammar.compiler import GrammarCompiler
from specray.grammar.matcher import GrammarMatcher
from specray.types import Grammar


class GuidedOutput:
    """Implements ``interfaces.OutputGrammar``: it helps drafting, and the target enforces the grammar.

    Args:
        matcher: at the start of the output; None: nothing is known of the grammar.
    """

    def __init__(self, matcher: GrammarMatcher | None) -> None:
        self._matcher = matcher

    def count_legal(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """See OutputGrammar."""
        if self._matcher is None:
            return len(token_ids)
        try:
            return self._matcher.count_legal(output_ids, token_ids)
        except SpecrayError:
            return len(token_ids)

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """See OutputGrammar."""
        if self._matcher is None:
            return ()
        try:
            return self._matcher.forced(output_ids, limit)
        except SpecrayError:
            return ()


class GuidedOutputs:
    """Implements ``interfaces.OutputGrammarFactory``, in threads beside the event loop.

    Args:
        tokenizer_json: returns the text of the model's ``tokenizer.json``; called with the first grammar.
        vocab_size: of the tokenizer.
        eos_token_ids: every token that ends an output.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    async def __call__(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> GuidedOutput:
        """See OutputGrammarFactory."""
        return await asyncio.to_thread(self._make, grammar, stop_token_ids)

    def _make(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> GuidedOutput:
        try:
            with self._lock:
                # For a large vocabulary it takes a second, which two first grammars need not both spend.
                if self._compiler is None:
                    self._compiler = GrammarCompiler(
                        self._tokenizer_json(), vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                    )
            return GuidedOutput(self._compiler.matcher(grammar, stop_token_ids))
        except (SpecrayError, ValueError):
            return GuidedOutput(None)
