"""Merges that follow from pieces and scores: their order, and that of transformers."""

from __future__ import annotations

import random

from transformers.tokenization_utils_base import generate_merges

from specray.models.gguf.tokenizer_files import derived_merges


def test_of_one_piece_the_merge_with_the_longest_left_part_comes_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    assert derived_merges(tokens, [0, 0, 0, -2, -1, -3]) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]


def test_the_order_is_that_of_transformers() -> None:
    draw = random.Random(0)
    for _ in range(20):
        tokens = ["".join(draw.choices("abc", k=draw.randrange(1, 6))) for _ in range(60)]
        scores = [-float(draw.randrange(4)) for _ in tokens]
        expected = generate_merges(
            {token: index for index, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True))
        )
        assert derived_merges(tokens, scores) == expected
