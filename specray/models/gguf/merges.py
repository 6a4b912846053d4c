"""The merges of sentencepiece vocabularies, which list none: they follow from the pieces and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

Merge = tuple[str, str]


def derived_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[Merge]:
    """Merges of two pieces to one, in the order in which they are made: of the piece with the highest score
    first, then those with the longest left, then right, part."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        pairs = [
            (token[:end], token[end:])
            for end in range(1, len(token))
            if token[:end] in ids and token[end:] in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]
