"""Predictions that the benchmark makes of outputs, and its figures."""

from __future__ import annotations

import random

import pytest

from specray.bench.core.figures import Tally
from specray.bench.prediction import MAX_EDIT_TOKENS, SPAN, PredictionRow, edited, renamed
from specray.tokenization import load_tokenizer


@pytest.mark.parametrize("seed", range(5))
def test_edits_stand_every_30_to_60_tokens(seed: int) -> None:
    output = tuple(range(1000))
    result = edited(output, random.Random(seed))
    breaks = [place for place in range(1, len(result)) if result[place] != result[place - 1] + 1]
    runs = [end - start for start, end in zip([0, *breaks], [*breaks, len(result)], strict=True)]
    kept = [run for run in runs if run > MAX_EDIT_TOKENS]
    assert all(SPAN[0] <= run <= SPAN[1] + MAX_EDIT_TOKENS for run in kept[:-1])
    assert 1000 / (SPAN[1] + MAX_EDIT_TOKENS) - 1 <= len(kept) <= 1000 / SPAN[0] + 1
    assert sum(kept) > 900
    assert edited(output, random.Random(seed)) == result


def test_most_frequent_word_is_renamed_throughout() -> None:
    tokenizer = load_tokenizer("embedded")
    text = "def add(total, value):\n    total_of = total\n    return total + value\n"
    output = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(renamed(output, tokenizer)) == (
        "def add(renamed_value, value):\n    total_of = renamed_value\n    return renamed_value + value\n"
    )
    none = tokenizer.encode("1 + 2", add_special_tokens=False)
    assert renamed(none, tokenizer) == none


def test_speedup_is_the_median_over_turns_of_ratios_within_a_turn() -> None:
    tally = Tally([3.0, 1.0, 0.5], [30, 30, 40], num_rounds=30, num_drafts=80, num_accepted=60)
    tally.num_equal, tally.num_outputs = 5, 6
    row = PredictionRow.of("equal", tally, Tally([3.0, 3.0, 1.0], [30, 30, 40]))
    assert row == PredictionRow("equal", 30.0, 2.0, 1.0, 100 / 30, 0.75, 5, 6)
