"""Token masks of requests with a grammar, for either engine: one matcher per sequence.

A matcher may be lost at any time: its state follows from the output's token ids, so a sequence that was
retried or taken over from another router simply gets a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from specray.engine_info import GrammarStats
from specray.grammar import GrammarMatcher, PreparedCompiler, TokenMasks
from specray.types import Grammar, SamplingParams

_MAX_MATCHERS: Final = 1024
"""Number of matchers that are kept, the latest used; another is made again from its output."""


class GrammarMasks:
    """Matchers of the running sequences.

    Args:
        compiler: of the target's tokenizer.
    """

    def __init__(self, compiler: PreparedCompiler) -> None:
        self._compiler = compiler
        self._matchers: OrderedDict[str, tuple[Grammar, GrammarMatcher]] = OrderedDict()

    def masks(
        self,
        request_id: str,
        sampling: SamplingParams,
        output_ids: Sequence[int],
        draft_ids: Sequence[int],
        parents: Sequence[int] | None = None,
    ) -> TokenMasks:
        """What the grammar allows after the output and after each draft token.

        Args:
            parents: of the draft tokens, where they are a tree.

        Returns:
            ``[len(draft_ids) + 1, num_words]``.

        Raises:
            InvalidRequestError: the grammar cannot be enforced, no token may follow, or the output breaks it.
        """
        assert sampling.grammar is not None
        kept = self._matchers.get(request_id)
        if kept is None or kept[0] != sampling.grammar:
            compiler = self._compiler.get()
            # May raise, though it was checked: by another compiler, or another version of it.
            matcher = compiler.matcher(sampling.grammar, sampling.stop_token_ids)
            kept = self._matchers[request_id] = (sampling.grammar, matcher)
            if len(self._matchers) > _MAX_MATCHERS:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(request_id)
        return kept[1].masks(output_ids, draft_ids, parents)

    @property
    def stats(self) -> GrammarStats:
        """What grammars have cost so far. Any thread may ask."""
        compiler = self._compiler.made
        if compiler is None:
            return GrammarStats()
        compiled, matched = compiler.stats, compiler.stats.matchers
        return GrammarStats(
            compile_s=compiled.compile_s,
            mask_s=matched.mask_s,
            num_compiled=compiled.num_compiled,
            num_cache_hits=compiled.num_cache_hits,
            num_illegal_drafts=matched.num_illegal_drafts,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._matchers.pop(request_id, None)
