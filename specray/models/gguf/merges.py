"""The merges of sentencepiece vocabularies, which list none: they follow from the pieces and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

Merge = tuple[str, str]


def derived_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[Merge]:
    """Merges of two pieces to one, in the order in which they are made: of the piece with the highest score
    first, then those with the longest left, then right, part."""
    known = set(tokens)
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in known and right in known:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]
