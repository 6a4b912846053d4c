"""Lookahead decoding: n-grams that the target makes of its own guesses, in every step.

Fu et al.: *Break the sequential dependency of LLM inference using lookahead decoding*, 2024 (arXiv
2402.02057). Behind the last committed token lies a *window* of guesses: ``width`` columns, and a level for
each token of an n-gram but the last. A row of level 0 sees the columns before it; a row of another level sees
its own column below it, and level 0 up to there::

    level 2       c0   c1   c2        position of a row: its column and its level, counted from the root
    level 1       b0   b1   b2        c1 sees the prefix, the root, a1, b1
    level 0     root   a1   a2

So the window is a tree, and rides in the forward that verifies draft tokens. The target's tokens after the
last level ends an n-gram in each column. Then all levels move down by one and the new tokens are the last: a
Jacobi iteration, of which the levels are the last few. The n-grams go into the request's pool, as do those of
its prompt and output; those that begin with the next token are proposed.

Guesses are the best tokens, without noise, so that n-grams are the same for every seed. The window's K/V are
never kept, and its rows change nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.draft_tokens import MAX_DRAFT_NODES, DraftTokens, LookaheadBudget

_STRIDE = 7919
"""Step by which the first guesses are picked from the prompt: a prime, so that they are from all over it."""


class NgramPool:
    """The latest n-grams that begin with each token.

    Args:
        ngram_len: tokens of an n-gram.
        num_kept: n-grams kept for each first token.
    """

    def __init__(self, ngram_len: int, num_kept: int) -> None:
        self._ngram_len = ngram_len
        self._num_kept = num_kept
        # The latest last.
        self._by_first: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Takes an n-gram; it is the latest now."""
        first, *rest = ngram
        kept = self._by_first.setdefault(first, {})
        kept.pop(tuple(rest), None)
        kept[tuple(rest)] = None
        if len(kept) > self._num_kept:
            del kept[next(iter(kept))]

    def add_text(self, token_ids: Sequence[int]) -> None:
        for start in range(len(token_ids) - self._ngram_len + 1):
            self.add(token_ids[start : start + self._ngram_len])

    def draft(self, token_id: int, *, num_nodes: int) -> DraftTokens:
        """What may follow a token, as a tree: the latest n-gram is its first chain."""
        places: dict[tuple[int, ...], int] = {(): -1}
        token_ids: list[int] = []
        parents: list[int] = []
        for rest in reversed(self._by_first.get(token_id, {})):
            for end in range(1, len(rest) + 1):
                if rest[:end] not in places and len(token_ids) < num_nodes:
                    places[rest[:end]] = len(token_ids)
                    parents.append(places[rest[: end - 1]])
                    token_ids.append(rest[end - 1])
        return DraftTokens(tuple(token_ids), tuple(parents))


class GuessWindow:
    """The levels of guesses.

    Args:
        budget: width and length of n-grams.
        token_ids: a text from which the first guesses are picked; at least one token.
    """

    def __init__(self, budget: LookaheadBudget, token_ids: Sequence[int]) -> None:
        self._budget = budget
        num_columns = budget.num_columns(1)
        picked = [token_ids[_STRIDE * column % len(token_ids)] for column in range(num_columns)]
        self._levels: list[list[int]] = [picked]

    @property
    def num_columns(self) -> int:
        """Columns of the window, that of the root among them."""
        return len(self._levels[0])

    @property
    def is_single(self) -> bool:
        """There is one level, and so the root's row is the first of the last level."""
        return len(self._levels) == 1

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the rows, level by level; column 0 of level 0 is the root and none of them."""
        return [token_id for level in self._levels for token_id in level][1:]

    @property
    def parents(self) -> list[int]:
        """The index of each row's parent among the rows; -1: the root."""
        columns = len(self._levels[0])
        # Row r is place r + 1 when the root is counted.
        num_rows = len(self._levels) * columns - 1
        return [row - (1 if row + 1 < columns else columns) for row in range(num_rows)]

    def advance(self, root: int, outputs: Sequence[int]) -> list[list[int]]:
        """Moves all levels down by one.

        Args:
            root: the token after which the window lay.
            outputs: the best token after each row of the last level, column by column.

        Returns:
            The n-grams that the columns have become; none until all levels are there.
        """
        levels = self._levels
        assert len(outputs) == len(levels[0]), (len(outputs), len(levels[0]))
        if len(levels) < self._budget.num_levels:
            # Of a level that has just begun nothing is dropped: all move to the left, towards the next root.
            self._levels = [level[1:] for level in (*levels, list(outputs))]
            return []
        levels[0][0] = root
        ngrams = [list(column) for column in zip(*levels, outputs, strict=True)]
        self._levels = [*levels[1:], list(outputs)]
        return ngrams


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows of a window in one step, after the rows of draft tokens."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    """Index of each row's parent among draft tokens and rows; -1: the last committed token."""
    num_outputs: int
    """Rows of the last level, which are the last ones."""
    with_root: bool
    """The row of the last committed token comes before them."""


class Lookahead:
    """GuessWindow and pool of one request.

    Args:
        budget: what is asked for.
    """

    def __init__(self, budget: LookaheadBudget) -> None:
        self.budget = budget
        self._pool = NgramPool(budget.ngram_len, budget.num_guesses)
        self._window: GuessWindow | None = None
        self._known: list[int] = []
        """Tokens whose n-grams are in the pool."""

    def rows(self, token_ids: Sequence[int], num_drafts: int, *, room: int) -> WindowRows | None:
        """The window's rows after some draft tokens; None: they do not fit.

        Args:
            token_ids: the committed tokens.
            room: rows that fit, those of draft tokens included.
        """
        if self._window is None:
            self._window = GuessWindow(self.budget, token_ids)
        window = self._window
        tokens = window.token_ids
        if num_drafts + len(tokens) > min(room, MAX_DRAFT_NODES):
            return None
        parents = [parent if parent < 0 else num_drafts + parent for parent in window.parents]
        is_single = window.is_single
        return WindowRows(tokens, parents, window.num_columns - is_single, is_single)

    def take(self, root: int, outputs: Sequence[int]) -> None:
        """Takes the target's tokens after the window."""
        assert self._window is not None, "there were rows"
        for ngram in self._window.advance(root, outputs):
            self._pool.add(ngram)

    def draft(self, token_ids: Sequence[int]) -> DraftTokens:
        """Takes what was committed, and proposes what may follow.

        Args:
            token_ids: prompt and output.
        """
        count = len(self._known)
        if count > len(token_ids) or (count and self._known[-1] != token_ids[count - 1]):
            count = 0
        start = max(0, count - self.budget.ngram_len + 1)
        self._pool.add_text(token_ids[start:])
        self._known = list(token_ids)
        # Besides them the window must fit.
        num_nodes = min(self.budget.max_guess_rows, MAX_DRAFT_NODES - self.budget.max_window_rows)
        return self._pool.draft(token_ids[-1], num_nodes=num_nodes)
