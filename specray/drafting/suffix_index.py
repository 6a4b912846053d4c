"""Suffix automaton with occurrence counts, the index of the suffix proposer.

Blumer et al.: *The smallest automaton recognizing the subwords of a text*, 1985; several texts in one
automaton as in Mohri et al.: *General suffix automaton construction algorithm and space bounds*, 2009. It
answers what the suffix trees of SuffixDecoding (arXiv 2411.04975) answer, with at most two states per token
instead of a node per token and depth.

A state represents all strings that end at the same positions. Occurrences are counted for strings of at most
``max_depth`` tokens: each new token adds one to every state with a suffix of the last ``max_depth`` tokens,
which are few unless the text repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

from specray.types import MAX_SPECULATIVE_TOKENS

ROOT = 0
"""State of the empty string."""
MAX_MATCH_LEN = 24
"""Maximum length in tokens of the suffix of a session that is searched."""
MAX_PROPOSAL_LEN = MAX_SPECULATIVE_TOKENS


class Match(NamedTuple):
    """An indexed string that is a suffix of another one."""

    state: int
    length: int
    """Tokens of the match; 0 for the root."""


class SuffixIndex:
    """Every string of the added texts, with its count and its latest position.

    ``append`` costs O(1) amortised for the structure and at most O(max_depth) for the counts.

    Args:
        max_depth: length in tokens up to which counts are exact, >= 1.
    """

    def __init__(self, *, max_depth: int = MAX_MATCH_LEN + MAX_PROPOSAL_LEN) -> None:
        assert max_depth >= 1, max_depth
        self.max_depth = max_depth
        self.num_tokens = 0
        """Tokens of all texts."""
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]
        self._latest: list[int] = [0]
        self._last = ROOT
        """State of the whole text so far."""
        self._tail = Match(ROOT, 0)
        """State of its last ``max_depth`` tokens."""

    def begin_text(self) -> None:
        """Starts a new text: later tokens do not continue earlier ones."""
        self._last = ROOT
        self._tail = Match(ROOT, 0)

    def append(self, token_id: int) -> None:
        """Appends a token to the text and counts its suffixes."""
        self._last = self._grow(token_id)
        self.num_tokens += 1
        self._count_tail(token_id)

    def count(self, state: int) -> int:
        """Number of occurrences of the state's strings of at most ``max_depth`` tokens."""
        return self._count[state]

    def latest(self, state: int) -> int:
        """Tokens of all texts up to the end of the latest occurrence."""
        return self._latest[state]

    def shorter(self, match: Match) -> Match | None:
        """The longest suffix of the match that occurs elsewhere too; None when only the root is left."""
        state = self._link[match.state]
        return Match(state, self._length[state]) if state > ROOT else None

    def cut(self, match: Match, length: int) -> Match:
        """The match's last ``length`` tokens, between 1 and its own length."""
        return Match(*self._within(match.state, length))

    def tail_match(self) -> Match | None:
        """The longest suffix of the text, up to ``max_depth`` tokens, that also occurred earlier."""
        match: Match | None = self._tail if self._tail.length else None
        while match is not None and self._count[match.state] < 2:
            match = self.shorter(match)
        return match

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The longest suffix of ``token_ids`` (at most ``max_depth`` of them) that occurs in the texts."""
        following, link = self._next, self._link
        state, length = ROOT, 0
        for token_id in token_ids[-self.max_depth :]:
            while state and token_id not in following[state]:
                state = link[state]
                length = self._length[state]
            if token_id in following[state]:
                state, length = following[state][token_id], length + 1
        return Match(state, length) if length else None

    def likeliest(self, state: int) -> tuple[int, int] | None:
        """The most frequent next token (of equals, the latest) and its state; None: nothing followed.

        The state's strings must be shorter than ``max_depth``.
        """
        following = self._next[state]
        if not following:
            return None
        count, latest = self._count, self._latest
        token_id = max(following, key=lambda token: (count[following[token]], latest[following[token]]))
        return token_id, following[token_id]

    def likely(self, state: int, most: int) -> list[tuple[int, int]]:
        """The ``most`` likeliest next tokens and their states, as ``likeliest`` orders them."""
        count, latest, following = self._count, self._latest, self._next[state]
        return nlargest(most, following.items(), key=lambda step: (count[step[1]], latest[step[1]]))

    # Structure

    def _grow(self, token_id: int) -> int:
        """Adds the strings that end with the new token; returns the state of the longest one."""
        following, link, length = self._next, self._link, self._length
        known = following[self._last].get(token_id)
        if known is not None:
            # An earlier text began with the same tokens.
            if length[known] == length[self._last] + 1:
                return known
            return self._clone(self._last, token_id, known)
        new = self._add_state({}, length[self._last] + 1)
        state = self._last
        while state >= ROOT and token_id not in following[state]:
            following[state][token_id] = new
            state = link[state]
        if state < ROOT:
            link[new] = ROOT
            return new
        known = following[state][token_id]
        link[new] = known if length[known] == length[state] + 1 else self._clone(state, token_id, known)
        return new

    def _clone(self, state: int, token_id: int, known: int) -> int:
        """Splits the strings of ``known`` that continue ``state`` or its suffixes into a new state."""
        following, link = self._next, self._link
        clone = self._add_state(dict(following[known]), self._length[state] + 1)
        self._count[clone] = self._count[known]
        self._latest[clone] = self._latest[known]
        link[clone] = link[known]
        link[known] = clone
        while state >= ROOT and following[state].get(token_id) == known:
            following[state][token_id] = clone
            state = link[state]
        return clone

    def _add_state(self, following: dict[int, int], length: int) -> int:
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1

    # Counts

    def _count_tail(self, token_id: int) -> None:
        # Both parts of a split state keep its transitions, so a transition is right but may lead too deep.
        following = self._next[self._tail.state][token_id]
        length = min(self._tail.length + 1, self.max_depth)
        self._tail = Match(*self._within(following, length))
        state = self._tail.state
        count, latest, link = self._count, self._latest, self._link
        while state > ROOT:
            count[state] += 1
            latest[state] = self.num_tokens
            state = link[state]

    def _within(self, state: int, length: int) -> tuple[int, int]:
        """The state among ``state`` and its links that holds the suffix of ``length`` tokens."""
        link = self._link
        while state > ROOT and length <= self._length[link[state]]:
            state = link[state]
        return state, length
