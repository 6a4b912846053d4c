"""Suffix decoding: the continuation that was written most often after what was written last.

Oliaro et al.: *SuffixDecoding: extreme speculative decoding for emerging AI applications*, arXiv 2411.04975.
Of every match with what came before, the likeliest path is followed; the estimated probability of each step
is how often it was taken, the proposal ends where the product falls below a bound, and the match whose path
promises the most accepted tokens is taken. So the proposal is long where the text repeats itself and short
where it does not. Paths only: trees need a target that verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.drafting.store import OutputStore
from specray.drafting.suffix_index import MAX_MATCH_LEN, MAX_PROPOSAL_LEN, Match, SuffixIndex

MIN_PROB = 0.1
"""A path ends where the estimated probability that all of it is accepted falls below."""
SPEC_FACTOR = 1.0
"""At most so many tokens are proposed per token of the match."""


class SuffixProposer:
    """Proposes from counts over the session's own tokens and, with a store, over past outputs.

    ``extend`` costs O(1) amortised per token for the structure and a few additions for the counts;
    ``propose`` follows a path of at most k tokens for each match; there are few, and never more than
    ``MAX_MATCH_LEN``.

    Args:
        store: of past outputs; None: the session alone.
        min_prob: the bound on a path's probability, in (0, 1].
        spec_factor: most proposed tokens per token of the match, > 0.
    """

    def __init__(
        self,
        *,
        store: OutputStore | None = None,
        min_prob: float = MIN_PROB,
        spec_factor: float = SPEC_FACTOR,
    ) -> None:
        self._store = store
        self._min_prob = min_prob
        self._spec_factor = spec_factor
        self._index = SuffixIndex()
        self._end: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that it was given."""
        return self._index.num_tokens

    @property
    def match_len(self) -> int:
        """Of the last tokens, how many the session had written before; at most MAX_MATCH_LEN."""
        match = self._own_match()
        return 0 if match is None else match.length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the session's next tokens."""
        append = self._index.append
        for token_id in token_ids:
            append(token_id)
        self._end.extend(token_ids)
        del self._end[:-MAX_MATCH_LEN]

    def propose(self, k: int) -> tuple[int, ...]:
        """At most ``k`` tokens, those with the highest expected number of accepted ones; often fewer."""
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        best = max(best, self._best(self._index, self._own_match(), k), key=_score)
        if self._store is None:
            return best[1]
        used = None
        for generation in self._store.generations:
            score, path = self._best(generation, generation.find(self._end), k)
            if score > best[0]:
                best, used = (score, path), generation
        if used is not None:
            self._store.touch(used, self._end, best[1])
        return best[1]

    def _own_match(self) -> Match | None:
        """The longest end of the session that it had written before."""
        match = self._index.tail_match()
        if match is None or match.length <= MAX_MATCH_LEN:
            return match
        return self._index.cut(match, MAX_MATCH_LEN)

    def _best(self, index: SuffixIndex, match: Match | None, k: int) -> tuple[float, tuple[int, ...]]:
        """The best path of an index: (expected accepted tokens, tokens)."""
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        while match is not None:
            best = max(best, self._path(index, match, k), key=_score)
            match = index.shorter(match)
        return best

    def _path(self, index: SuffixIndex, match: Match, k: int) -> tuple[float, tuple[int, ...]]:
        longest = min(k, int(self._spec_factor * match.length), MAX_PROPOSAL_LEN)
        state, prob, score = match.state, 1.0, 0.0
        tokens: list[int] = []
        while len(tokens) < longest:
            step = index.likeliest(state)
            if step is None:
                break
            token_id, following = step
            prob *= index.count(following) / index.count(state)
            if prob < self._min_prob:
                break
            tokens.append(token_id)
            score += prob
            state = following
        return score, tuple(tokens)


def _score(path: tuple[float, tuple[int, ...]]) -> float:
    return path[0]
