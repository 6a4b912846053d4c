"""N-gram proposer (prompt lookup): proposes what followed the last tokens earlier in the session.

Saxena: *Prompt lookup decoding*, 2023 (github.com/apoorvumang/prompt-lookup-decoding); the same as vLLM's
``ngram`` and transformers' ``prompt_lookup_num_tokens``. Those scan all tokens in every round; here each
token is indexed once.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_MATCH_LEN = 2
MAX_MATCH_LEN = 4
LONG_MATCH_LEN = 8
"""Match length in tokens that counts as a repetition. On HumanEval at temperature 0, 85 % of the fallback's
tokens after such a match were accepted (counters by source, ``overlap`` serial)."""


class NgramProposer:
    """Finds the latest earlier occurrence of the longest n-gram of last tokens, ``min_len..max_len`` long.

    ``extend`` costs O(max_len) per token, ``propose`` O(k), regardless of the session's length.

    Args:
        min_len: shortest n-gram in tokens, >= 1.
        max_len: longest n-gram in tokens, >= min_len.
    """

    def __init__(self, *, min_len: int = MIN_MATCH_LEN, max_len: int = MAX_MATCH_LEN) -> None:
        assert 1 <= min_len <= max_len, (min_len, max_len)
        self._tokens: list[int] = []
        # For each length: n-gram -> end of its latest occurrence, where its continuation begins.
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(min_len, max_len + 1)
        ]
        self._follow: int | None = None

    @property
    def match_len(self) -> int:
        """Length of the match in tokens, counted up to LONG_MATCH_LEN."""
        if self._follow is None:
            return 0
        tokens, end = self._tokens, len(self._tokens)
        most = min(LONG_MATCH_LEN, self._follow)
        length = 0
        while length < most and tokens[self._follow - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    @property
    def num_tokens(self) -> int:
        """Number of tokens given so far."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the session's next tokens."""
        tokens = self._tokens
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            self._follow = None
            for length, ends in self._ends:
                if length > end:
                    break
                gram = tuple(tokens[end - length :])
                earlier = ends.get(gram)
                if earlier is not None:
                    self._follow = earlier
                ends[gram] = end

    def propose(self, k: int) -> tuple[int, ...]:
        """Returns the ``k`` tokens that followed the match; empty without one.

        If fewer than ``k`` tokens follow the match, the text is periodic: the period is repeated.
        """
        if self._follow is None or k <= 0:
            return ()
        follow = self._tokens[self._follow : self._follow + k]
        return tuple((follow * -(-k // len(follow)))[:k])
