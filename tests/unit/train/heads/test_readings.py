"""What is kept of a target is what it says, and it runs once over each row that there is memory for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from specray.train.draft.loss import target_view
from specray.train.heads.target import FeatureReader, ReadRows, TargetReadings
from tests.unit.train.heads.runs import varied_model

ROWS = torch.tensor([[1, 40, 50, 60, 70, 80], [1, 41, 51, 61, 71, 81], [1, 42, 52, 62, 72, 82]])
DRAFT_IDS = torch.tensor([3, 40, 41, 100, 258])
LAYERS = (0, 1)
ROW_BYTES = len(ROWS[0]) * (3 * 4 * 32 + 4 + 8)
"""Bytes of a row: two layers and what the head reads, 32 float32 each, and by token a total and an id."""


class Counted:
    """A reader that counts the rows over which its target runs."""

    def __init__(self, model: Any) -> None:
        self.reader = FeatureReader(model, LAYERS)
        self.num_rows = 0
        read = self.reader.read

        def counting(token_ids: torch.Tensor) -> Any:
            self.num_rows += len(token_ids)
            return read(token_ids)

        self.reader.read = counting  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model() -> Any:
    return varied_model().float()


def assert_is_the_targets(found: ReadRows, model: Any, rows: torch.Tensor) -> None:
    with torch.no_grad():
        output = model(input_ids=rows, output_hidden_states=True, use_cache=False)
    for layer in LAYERS:
        assert torch.allclose(found.features[layer], output.hidden_states[layer], atol=1e-4)
    assert torch.equal(found.best, output.logits.argmax(-1))
    for view, logits in zip(found.views, output.logits, strict=True):
        expected = target_view(logits, DRAFT_IDS)
        assert torch.allclose(view.log_probs, expected.log_probs, atol=1e-4)
        assert torch.equal(view.column, expected.column)
        assert torch.equal(view.is_known, expected.is_known)


def assert_same(first: ReadRows, second: ReadRows) -> None:
    assert all(torch.equal(first.features[layer], second.features[layer]) for layer in LAYERS)
    assert torch.equal(first.best, second.best)
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(first.views, second.views, strict=True))


def test_the_target_runs_once_over_each_row(model: Any) -> None:
    counted = Counted(model)
    readings = TargetReadings(counted.reader, DRAFT_IDS, max_bytes=3 * ROW_BYTES)
    first = readings.read(ROWS[:2])
    assert_is_the_targets(first, model, ROWS[:2])
    assert counted.num_rows == 2
    # One is kept, and one is new; the order is that of the question.
    assert_is_the_targets(readings.read(ROWS[[2, 0]]), model, ROWS[[2, 0]])
    assert counted.num_rows == 3
    assert_same(readings.read(ROWS[:2]), first)
    assert counted.num_rows == 3


def test_rows_without_room_are_read_again_and_are_the_same(model: Any) -> None:
    counted = Counted(model)
    readings = TargetReadings(counted.reader, DRAFT_IDS, max_bytes=2 * ROW_BYTES)
    first = readings.read(ROWS)
    assert_is_the_targets(first, model, ROWS)
    assert_is_the_targets(readings.read(ROWS), model, ROWS)
    assert counted.num_rows == 4, "two of three were kept"
    nothing = TargetReadings(Counted(model).reader, DRAFT_IDS, max_bytes=0)
    assert_same(nothing.read(ROWS), first)


def test_logits_that_are_no_product_with_the_head_are_kept_themselves() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    scaled = GraniteForCausalLM(GraniteConfig(vocab_size=259, logits_scaling=4.0, **sizes)).eval()
    counted = Counted(scaled)
    readings = TargetReadings(counted.reader, DRAFT_IDS, max_bytes=1 << 20)
    for _ in range(2):
        assert_is_the_targets(readings.read(ROWS), scaled, ROWS)
    assert counted.num_rows == 3
