"""One request's grammar as a router sees it: which draft tokens are legal, and which tokens are forced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specray.errors import SpecrayError
from specray.grammar.compiler import PreparedCompiler
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
        if self._matcher is None:
            return len(token_ids)
        try:
            return self._matcher.count_legal(output_ids, token_ids)
        except SpecrayError:
            return len(token_ids)

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        if self._matcher is None:
            return ()
        try:
            return self._matcher.forced(output_ids, limit)
        except SpecrayError:
            return ()


class GuidedOutputs:
    """Implements ``interfaces.OutputGrammarFactory``, in threads, off the event loop.

    Args:
        compiler: of the target's tokenizer.
    """

    def __init__(self, compiler: PreparedCompiler) -> None:
        self._compiler = compiler

    async def __call__(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> GuidedOutput:
        return await asyncio.to_thread(self._make, grammar, stop_token_ids)

    def _make(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> GuidedOutput:
        try:
            return GuidedOutput(self._compiler.get().matcher(grammar, stop_token_ids))
        except (SpecrayError, ValueError):
            return GuidedOutput(None)
