"""N-gram proposer (prompt lookup): proposes what followed the last tokens earlier in the session.

Saxena: *Prompt lookup decoding*, 2023 (github.com/apoorvumang/prompt-lookup-decoding); the same as vLLM's
``ngram`` and transformers' ``prompt_lookup_num_tokens``. Those scan all tokens in every round; here each
token is indexed once. Earlier occurrences that go on differently become branches of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting.trie import grow

MAX_MATCH_LEN = 4
LONG_MATCH_LEN = 8
"""Match length in tokens that counts as a repetition. On HumanEval at temperature 0, 85 % of the fallback's
tokens after such a match were accepted (counters by source, ``overlap`` serial)."""
TOKEN_CHANCE = 0.7
"""Estimated chance that an occurrence which was right until a token is right about it: a branch that goes on
is worth less than another one's beginning."""
LENGTH_WEIGHT = 2.0
"""Factor on an occurrence's weight for each further token that matches."""


class NgramProposer:
    """Finds the latest earlier occurrence of the longest n-gram of last tokens, ``min_len..max_len`` long.

    ``extend`` costs O(max_len) per token, ``propose`` O(k), regardless of the session's length; a tree O(k)
    for each occurrence.

    Args:
        min_len: shortest n-gram in tokens, >= 1.
        max_len: longest n-gram in tokens, >= min_len.
    """

    def __init__(self, *, min_len: int = 2, max_len: int = MAX_MATCH_LEN) -> None:
        assert 1 <= min_len <= max_len, (min_len, max_len)
        self._tokens: list[int] = []
        # For each length: n-gram -> end of its latest occurrence, where its continuation begins.
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(min_len, max_len + 1)
        ]
        self._min_len = min_len
        self._earlier: list[int] = [0]
        """For each end of a shortest n-gram, the end of its occurrence before that; 0: there was none."""
        self._follow: int | None = None

    @property
    def match_len(self) -> int:
        """Length of the match in tokens, counted up to LONG_MATCH_LEN."""
        return 0 if self._follow is None else self._match_len(self._follow)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the session's next tokens."""
        tokens = self._tokens
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            self._follow = None
            self._earlier.append(0)
            for length, ends in self._ends:
                if length > end:
                    break
                gram = tuple(tokens[end - length :])
                earlier = ends.get(gram)
                if earlier is not None:
                    self._follow = earlier
                    if length == self._min_len:
                        self._earlier[end] = earlier
                ends[gram] = end

    def propose(self, k: int, num_nodes: int = 0) -> DraftTokens:
        """The ``k`` tokens that followed the match; none without one.

        If fewer than ``k`` tokens follow the match, the text is periodic: the period is repeated.

        Args:
            num_nodes: with more than ``k``, what followed other occurrences becomes branches of it, of as
                many nodes in all; nodes are worth more the longer their occurrences match, and the more do.
        """
        if self._follow is None or k <= 0:
            return NO_DRAFT
        follow = self._tokens[self._follow : self._follow + k]
        chain = (follow * -(-k // len(follow)))[:k]
        if num_nodes <= k:
            return DraftTokens(tuple(chain))
        return grow(chain, self._occurrences(), num_nodes=num_nodes, depth=k)

    def is_prefix_of(self, token_ids: Sequence[int]) -> bool:
        """Whether other tokens begin with those given so far, as far as the last one of these shows."""
        count = len(self._tokens)
        return count <= len(token_ids) and (not count or token_ids[count - 1] == self._tokens[-1])

    def continuation(self, token_ids: Sequence[int], k: int) -> tuple[int, ...]:
        """What ``propose`` would say had some more tokens been given, which are not kept; up to ``k`` tokens.

        Matches among these alone are not found.
        """
        if not token_ids:
            return self.propose(k).token_ids
        if k <= 0:
            return ()
        last = [*self._tokens[-self._ends[-1][0] :], *token_ids]
        for length, ends in reversed(self._ends):
            end = ends.get(tuple(last[-length:]))
            if end is not None:
                follow = [*self._tokens[end : end + k], *token_ids][:k]
                return tuple((follow * -(-k // len(follow)))[:k])
        return ()

    def _occurrences(self) -> list[_Occurrence]:
        """The latest ones, with weights that sum to one."""
        ends: list[int] = []
        end = self._earlier[-1]
        # Earlier occurrences that a tree is made of, the latest ones.
        while end and len(ends) < 16:
            ends.append(end)
            end = self._earlier[end]
        weights = [LENGTH_WEIGHT ** self._match_len(end) for end in ends]
        return [
            _Occurrence(self._tokens, end, weight / sum(weights))
            for end, weight in zip(ends, weights, strict=True)
        ]

    def _match_len(self, earlier: int) -> int:
        """Length of the match that ends there, counted up to LONG_MATCH_LEN."""
        tokens, end = self._tokens, len(self._tokens)
        most, length = min(LONG_MATCH_LEN, earlier), 0
        while length < most and tokens[earlier - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class _Occurrence(NamedTuple):
    """Implements ``trie.Continuation``: an earlier place in the session's own tokens."""

    tokens: list[int]
    place: int
    """Index of the token that comes next there."""
    weight: float

    def next(self) -> Iterable[tuple[int, _Occurrence]]:
        """See Continuation: one token, or none at the session's end."""
        if self.place < len(self.tokens):
            following = _Occurrence(self.tokens, self.place + 1, TOKEN_CHANCE * self.weight)
            yield self.tokens[self.place], following
