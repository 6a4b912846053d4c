"""Which of the target's rows a draft token is compared with, and what counts as accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from specray.train.draft.loss import LossConfig
from specray.train.draft.writing import Written
from specray.train.heads.acceptance import DepthCounts, count_accepted, tokens_per_round
from specray.train.heads.base import DraftRows, all_anchors
from specray.train.heads.target import FeatureReader, TargetReadings
from specray.train.heads.trainer import HeadTrainer, StepConfig
from specray.train.optim import MasterOptimizer, OptimizerConfig
from tests.unit.train.heads.runs import varied_model

IDS = torch.tensor([[1, 40, 50, 60, 70, 80, 90, 91]])


class Oracle(nn.Module):
    """Drafts as the target itself would behind the same text; a depth may be late by some places."""

    name = "oracle"
    feature_layers = (1,)
    num_depths = 3

    def __init__(self, model: Any, *, late: int = 0) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(2, 2))
        self.norm = nn.Parameter(torch.ones(2))
        self.draft_ids = torch.arange(259)
        self.rank_acceptance: list[list[float]] | None = []
        self._late = late
        self._logits = model(input_ids=IDS, use_cache=False).logits.detach()

    @property
    def module(self) -> nn.Module:
        return self

    def trained_anchors(self, num_tokens: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
        return all_anchors(num_tokens, self.num_depths)

    def unroll(
        self, features: Mapping[int, torch.Tensor], token_ids: torch.Tensor, anchors: Sequence[torch.Tensor]
    ) -> Sequence[DraftRows]:
        shift = 1 - self._late
        return [DraftRows(self._logits[:, own + depth + shift]) for depth, own in enumerate(anchors)]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def config(self, target: str) -> dict[str, Any]:
        return {}


def written_of(ids: torch.Tensor, answers: NDArray[np.bool_]) -> Written:
    rows = len(ids)
    return Written(ids.numpy().astype(np.uint16), answers, np.array(["text"] * rows), np.zeros(rows, bool))


def evaluated(*, late: int) -> tuple[dict[str, float], Oracle]:
    model = varied_model().float()
    # The text is what the target finds most likely, so that chains go on.
    with torch.no_grad():
        for column in range(1, IDS.shape[1]):
            IDS[0, column] = model(input_ids=IDS[:, :column]).logits[0, -1].argmax()
    assert len(set(IDS[0].tolist())) > 5
    answers = np.array([[False, False, True, True, True, True, True, True]])
    written = written_of(IDS, answers)
    config = StepConfig(loss=LossConfig(argmax_weight=0.0))
    head = Oracle(model, late=late)
    readings = TargetReadings(FeatureReader(model, (1,)), head.draft_ids, max_bytes=1 << 20)
    optimizer = MasterOptimizer(head, OptimizerConfig())
    trainer = HeadTrainer(readings, head, written, config, optimizer, torch.device("cpu"))
    return trainer.evaluate(written), head


def test_a_head_that_knows_the_target_has_no_loss_and_is_always_accepted() -> None:
    figures, head = evaluated(late=0)
    assert head.rank_acceptance is not None
    # Six, five and four places: all have the first rank; each of the eight others counts as half a place.
    expected = [[round(n / (n + 4), 5), round(0.5 / (n + 4), 5)] for n in (6, 5, 4)]
    assert [row[:2] for row in head.rank_acceptance] == expected
    assert figures["held_out_tokens_per_round"] == 4.0
    assert [figures[f"held_out_accepted_{place}"] for place in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert figures["held_out_agreement_3"] == 1.0
    assert abs(figures["held_out_loss"]) < 1e-6
    wrong, late = evaluated(late=1)
    assert late.rank_acceptance is not None and late.rank_acceptance[0][0] < 1.0
    assert wrong["held_out_loss"] > 1e-2 and wrong["held_out_tokens_per_round"] < 2.0


def test_a_depth_counts_where_all_before_it_were_right_and_the_text_went_on_so() -> None:
    hits = [
        torch.tensor([[True, True, False, True, True]]),
        torch.tensor([[True, False, True, True]]),
        torch.tensor([[False, True, True]]),
    ]
    # Tokens 2..6 are drafted first; token 5 is not what the target finds most likely.
    follows = torch.tensor([[False, True, True, True, True, False, True]])
    is_counted = torch.tensor([[True, False, True, True, True, True, True]])
    counts = count_accepted(hits, follows, is_counted)
    # Depth 2 is reached from anchors 0 and 1 (2 was wrong, behind 3 the text went another way).
    assert counts == [DepthCounts(5, 4), DepthCounts(2, 1), DepthCounts(1, 0)]
    assert tokens_per_round(counts) == pytest.approx(1 + 4 / 5 + 4 / 5 / 2)


def test_what_no_server_would_generate_is_not_counted() -> None:
    hits = [torch.tensor([[True, True]]), torch.tensor([[True]])]
    follows = torch.ones(1, 4, dtype=torch.bool)
    is_counted = torch.tensor([[True, True, True, False]])
    assert count_accepted(hits, follows, is_counted) == [DepthCounts(1, 1), DepthCounts(0, 0)]
