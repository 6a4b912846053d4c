"""Suffix proposer: proposes the most frequent continuation of the last tokens (suffix decoding).

Oliaro et al.: *SuffixDecoding: extreme speculative decoding for emerging AI applications*, arXiv 2411.04975.
For every match of the last tokens it follows the likeliest path. The relative frequency of a step estimates
its probability; the path ends where the product falls below a bound. The path with the most expected accepted
tokens is proposed. So proposals are long where the text repeats itself and short elsewhere.

Where more nodes are asked for, the other continuations of all matches become branches next to that path: each
match is an expert that gives its share of the weight to each token, by how often it followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting.store import OutputStore
from specray.drafting.suffix_index import MAX_MATCH_LEN, MAX_PROPOSAL_LEN, Match, SuffixIndex
from specray.drafting.trie import grow

LENGTH_WEIGHT = 2.0
"""Factor on a match's weight for each further token of it."""


class SuffixProposer:
    """Proposes from counts over the session's own tokens and, with a store, over past outputs.

    ``extend`` costs O(1) amortised per token for the structure and a few additions for the counts;
    ``propose`` follows a path of at most k tokens per match, for at most ``MAX_MATCH_LEN`` matches and
    usually a few.

    Args:
        store: past outputs; None: the session alone.
        min_prob: minimum estimated probability that a whole path is accepted, in (0, 1].
        spec_factor: maximum proposed tokens per token of the match, > 0.
    """

    def __init__(
        self,
        *,
        store: OutputStore | None = None,
        min_prob: float = 0.1,
        spec_factor: float = 1.0,
    ) -> None:
        self._store = store
        self._min_prob = min_prob
        self._spec_factor = spec_factor
        self._index = SuffixIndex()
        self._end: list[int] = []

    @property
    def num_tokens(self) -> int:
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

    def propose(self, k: int, num_nodes: int = 0) -> DraftTokens:
        """The path with the most expected accepted tokens, at most ``k`` long, often shorter.

        Args:
            num_nodes: with more than the path has, its other continuations become branches next to it, of as
                many nodes in all.
        """
        matches = [(self._index, self._own_match())]
        if self._store is not None:
            matches += [(index, index.find(self._end)) for index in self._store.generations]
        used = self._index
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        for index, match in matches:
            found = self._best(index, match, k)
            if found[0] > best[0]:
                used, best = index, found
        path = best[1]
        if not path:
            return NO_DRAFT
        draft = DraftTokens(path)
        if num_nodes > len(path):
            draft = grow(path, self._experts(matches), num_nodes=num_nodes, depth=min(k, MAX_PROPOSAL_LEN))
        # It changes the other index, of which there are matches.
        if self._store is not None and used is not self._index:
            self._store.touch(used, self._end, path)
        return draft

    def _experts(self, matches: Sequence[tuple[SuffixIndex, Match | None]]) -> list[_Expert]:
        """All matches, the shorter ones too, with weights that sum to one."""
        found: list[tuple[SuffixIndex, Match]] = []
        for index, match in matches:
            while match is not None:
                found.append((index, match))
                match = index.shorter(match)
        weights = [LENGTH_WEIGHT**match.length for _, match in found]
        return [
            _Expert(index, match.state, weight / sum(weights), int(self._spec_factor * match.length))
            for (index, match), weight in zip(found, weights, strict=True)
        ]

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


class _Expert(NamedTuple):
    """Implements ``trie.Continuation``: a match, and tokens after it that were followed."""

    texts: SuffixIndex
    state: int
    weight: float
    num_left: int
    """Tokens for which it may still be followed."""

    def next(self) -> Iterable[tuple[int, _Expert]]:
        """See Continuation: tokens by how often they followed."""
        if self.num_left <= 0:
            return
        texts = self.texts
        count = texts.count(self.state)
        for token_id, following in texts.likely(self.state, 4):
            share = self.weight * texts.count(following) / count
            yield token_id, _Expert(texts, following, share, self.num_left - 1)


def _score(path: tuple[float, tuple[int, ...]]) -> float:
    return path[0]
