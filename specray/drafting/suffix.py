"""Suffix proposer: proposes the most frequent continuation of the last tokens (suffix decoding).

Oliaro et al.: *SuffixDecoding: extreme speculative decoding for emerging AI applications*, arXiv 2411.04975.
For every match of the last tokens it follows the likeliest path. The relative frequency of a step estimates
its probability; the path ends where the product falls below a bound. The path with the most expected accepted
tokens is proposed. So proposals are long where the text repeats itself and short elsewhere. Only paths are
proposed: trees would need a target that verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.drafting.store import OutputStore
from specray.drafting.suffix_index import MAX_MATCH_LEN, MAX_PROPOSAL_LEN, Match, SuffixIndex

MIN_PROB = 0.1
"""Minimum estimated probability that a whole path is accepted."""
SPEC_FACTOR = 1.0
"""Maximum proposed tokens per token of the match."""


class SuffixProposer:
    """Proposes from counts over the session's own tokens and, with a store, over past outputs.

    ``extend`` costs O(1) amortised per token for the structure and a few additions for the counts;
    ``propose`` follows a path of at most k tokens per match, for at most ``MAX_MATCH_LEN`` matches and
    usually a few.

    Args:
        store: past outputs; None: the session alone.
        min_prob: minimum probability of a path, in (0, 1].
        spec_factor: maximum proposed tokens per token of the match, > 0.
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
        """Number of tokens given so far."""
        return self._index.num_tokens

    @property
    def match_len(self) -> int:
        """Length in tokens of the match within the session; at most MAX_MATCH_LEN."""
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
        """Returns the path with the most expected accepted tokens, at most ``k`` long, often shorter."""
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
        """The longest suffix of the session that occurred earlier in it."""
        match = self._index.tail_match()
        if match is None or match.length <= MAX_MATCH_LEN:
            return match
        return self._index.cut(match, MAX_MATCH_LEN)

    def _best(self, index: SuffixIndex, match: Match | None, k: int) -> tuple[float, tuple[int, ...]]:
        """Best path of an index: (expected accepted tokens, tokens)."""
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
