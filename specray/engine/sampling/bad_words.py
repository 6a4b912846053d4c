"""Finds the rows in which a bad word would become complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from specray.engine.sampling.state import RowGroup


def bad_ends(group: RowGroup) -> Iterator[tuple[int, int]]:
    """Pairs of a row and the last token of a bad word whose other tokens end the output before that row.

    Only the output counts: a word that the prompt begins is none.
    """
    words = group.sampling.bad_words
    if not words:
        return
    by_previous: defaultdict[int | None, list[tuple[int, ...]]] = defaultdict(list)
    for word in words:
        by_previous[word[-2] if len(word) > 1 else None].append(word)
    longest = max(map(len, words))
    tail = group.state.output_tail(longest - 1) if longest > 1 else []
    # What is under verification belongs to the output, but for a prompt that is not complete yet.
    num_prompt = max(0, group.sampling.num_prompt_tokens - group.state.length)
    for row in range(group.num_rows):
        before = tail + [group.token_ids[index] for index in group.path(row)[num_prompt:]]
        for word in by_previous[None]:
            yield row, word[-1]
        for word in by_previous.get(before[-1], ()) if before else ():
            if tuple(before[1 - len(word) :]) == word[:-1]:
                yield row, word[-1]
