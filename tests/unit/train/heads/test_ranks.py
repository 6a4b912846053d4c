"""Ranks of the target's token among a head's: where they count, and what becomes of them."""

from __future__ import annotations

import torch

from specray.train.heads.acceptance import NUM_RANKS, count_ranks, places_of, rank_rates


def test_ranks_are_counted_where_a_greedy_text_would_have_come() -> None:
    follows = torch.tensor([[0, 0, 1, 1, 0, 1, 1]]).bool()
    is_answer = torch.tensor([[0, 0, 1, 1, 1, 1, 0]]).bool()
    places = places_of(follows, is_answer, 3)
    # Anchor q drafts token q + 2 + depth; the tokens before that must be what the target says.
    assert [place.int().tolist() for place in places] == [
        [[1, 1, 1, 1, 0]],
        [[1, 1, 0, 0]],
        [[1, 0, 0]],
    ]


def test_a_rank_is_the_number_of_better_tokens() -> None:
    logits = torch.arange(12.0).flip(0).repeat(1, 4, 1)
    columns = torch.tensor([[0, 2, 11, -1]])
    counted = torch.ones(1, 4).bool()
    [counts] = count_ranks([logits], [columns], [counted])
    assert counts.tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 2]
    [none] = count_ranks([logits], [columns], [torch.zeros(1, 4).bool()])
    assert none.tolist() == [0] * (NUM_RANKS + 1)


def test_rates_are_chances_and_never_zero() -> None:
    counts = torch.tensor([[6, 2, 0, 0, 0, 0, 0, 0, 9], [0] * 9])
    assert rank_rates(counts) == [[0.3, 0.1, *[0.025] * 6], [0.11111] * 8]
