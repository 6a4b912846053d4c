"""Steps and held-out figures of a head: its loss by depth against the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specray.train.draft.loss import DraftLoss, TargetView, target_view, view_loss
from specray.train.draft.text import picked_rows
from specray.train.draft.writing import Written
from specray.train.heads.acceptance import (
    DepthCounts,
    count_accepted,
    count_ranks,
    places_of,
    rank_rates,
    tokens_per_round,
)
from specray.train.heads.base import Head
from specray.train.heads.target import FeatureReader
from specray.train.loop import RunState
from specray.train.optim import MasterOptimizer, OptimizerConfig

_OVERLAP_FROM = 0.6
"""Share of the run after which the overlap joins the loss."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Options of training steps."""

    rows_per_step: int = 16
    rows_per_forward: int = 2
    depth_decay: float = 0.8
    """Factor of the loss from one depth to the next."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            matrix_learning_rate=4e-3, learning_rate=6e-4, weight_decay=0.02
        )
    )
    argmax_weight: float = 0.3
    """Weight of the cross-entropy on the target's most likely token."""
    overlap_weight: float = 1.0
    """Weight of the total variation distance, in the last two fifths of the run."""
    other_weight: float = 0.1
    """Weight of tokens that no server would generate: what is given, and the user's turns."""
    seed: int = 0


class HeadTrainer:
    """Steps a head over rows that its target has written.

    Args:
        reader: the target; reads the head's layers.
        written: rows to train on.
    """

    def __init__(
        self, reader: FeatureReader, head: Head, written: Written, config: StepConfig, device: torch.device
    ) -> None:
        self._reader = reader
        self._head = head
        self._config = config
        self._device = device
        self._ids = torch.from_numpy(written.token_ids.astype(np.int32)).to(device)
        self._is_answer = torch.from_numpy(written.is_answer).to(device)
        self._decays = [config.depth_decay**depth for depth in range(head.num_depths)]
        self.optimizer = MasterOptimizer(head.module, config.optimizer)
        self.held_out: dict[str, float] = {}
        """Figures of the last evaluation."""

    def step(self, state: RunState, progress: float) -> dict[str, float]:
        """One step; returns its figures, and the last held-out tokens of a round."""
        config = self._config
        picked = picked_rows(state.cursor, config.rows_per_step, num_rows=len(self._ids), seed=config.seed)
        rows = torch.tensor(picked, device=self._device)
        ids, is_answer = self._ids[rows].long(), self._is_answer[rows]
        overlap_weight = config.overlap_weight if progress >= _OVERLAP_FROM else 0.0
        scale = 1.0 / max(float(self._weights(is_answer, config.other_weight)[:, 2:].sum()), 1e-6)
        parts = []
        for own_ids, own_answers in zip(
            torch.split(ids, config.rows_per_forward),
            torch.split(is_answer, config.rows_per_forward),
            strict=True,
        ):
            weights = self._weights(own_answers, config.other_weight)
            losses = self._losses(own_ids, weights, overlap_weight)[0]
            self._joined([each.loss for each in losses]).mul(scale).backward()  # type: ignore[no-untyped-call]
            parts.append(losses)
        norm = self.optimizer.step(progress)
        state.cursor += len(picked)
        state.num_tokens += ids.numel()
        last = {name: self.held_out[name] for name in ("held_out_tokens_per_round",) if name in self.held_out}
        return {**self._means(parts), "grad_norm": norm, **last}

    @torch.no_grad()
    def evaluate(self, held_out: Written) -> dict[str, float]:
        """Loss, and acceptance by depth, on answers that were not trained on."""
        all_ids = torch.from_numpy(held_out.token_ids.astype(np.int64)).to(self._device)
        all_answers = torch.from_numpy(held_out.is_answer).to(self._device)
        size = self._config.rows_per_forward
        parts: list[list[DraftLoss]] = []
        totals = [DepthCounts() for _ in self._decays]
        ranks: list[torch.Tensor] = []
        for ids, is_answer in zip(torch.split(all_ids, size), torch.split(all_answers, size), strict=True):
            losses, seen = self._losses(ids, self._weights(is_answer, 0.0), 0.0)
            parts.append(losses)
            for total, found in zip(totals, count_accepted(seen.hits, seen.follows, is_answer), strict=True):
                total.num_reached += found.num_reached
                total.num_accepted += found.num_accepted
            if self._head.rank_acceptance is not None:
                places = places_of(seen.follows, is_answer, len(self._decays))
                ranks.append(count_ranks(seen.logits, seen.columns, places))
        if ranks:
            self._head.rank_acceptance = rank_rates(torch.stack(ranks).sum(0))
        figures = {
            **self._means(parts),
            **{f"accepted_{depth}": total.rate for depth, total in enumerate(totals, 1)},
            "tokens_per_round": tokens_per_round(totals),
        }
        self.held_out = {f"held_out_{name}": value for name, value in figures.items()}
        return self.held_out

    def _losses(
        self, ids: torch.Tensor, weights: torch.Tensor, overlap_weight: float
    ) -> tuple[list[DraftLoss], _Seen]:
        """The loss of each depth, and where the head and the text agree with the target.

        Args:
            weights: ``[num_rows, length]``, of each token.
        """
        num_rows, draft_ids = len(ids), self._head.draft_ids
        # What the target's row i says is of token i + 1.
        target = self._reader.read(ids[:, :-1])
        best = target.logits.argmax(-1)
        features = {layer: rows[:, :-1] for layer, rows in target.features.items()}
        drafted = self._head.unroll(features, ids[:, 1:-1], self._head.num_depths)
        views = [target_view(rows, draft_ids) for rows in target.logits]
        losses, hits, columns = [], [], []
        for depth, logits in enumerate(drafted):
            # Depth s of anchor q drafts token q + 2 + s.
            behind = 1 + depth
            view = _joined_view([_from(each, behind) for each in views])
            losses.append(
                view_loss(
                    view,
                    logits.flatten(0, 1),
                    weights[:, behind + 1 :].flatten(),
                    argmax_weight=self._config.argmax_weight,
                    overlap_weight=overlap_weight,
                )
            )
            hits.append(draft_ids[logits.detach().argmax(-1)] == best[:, behind:])
            column = torch.where(view.is_known, view.column, -1)
            columns.append(column.view(num_rows, -1))
        follows = torch.cat((ids.new_zeros(num_rows, 1, dtype=torch.bool), best == ids[:, 1:]), 1)
        return losses, _Seen(hits, follows, [rows.detach() for rows in drafted], columns)

    def _joined(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean over depths, each with its weight."""
        total = sum(value * decay for value, decay in zip(values, self._decays, strict=True))
        return torch.as_tensor(total) / sum(self._decays)

    @staticmethod
    def _weights(is_answer: torch.Tensor, other_weight: float) -> torch.Tensor:
        return torch.where(is_answer, 1.0, other_weight)

    def _means(self, parts: list[list[DraftLoss]]) -> dict[str, float]:
        """The joined loss, and agreement and loss of each depth."""
        losses, figures = [], {}
        for depth, found in enumerate(zip(*parts, strict=True), 1):
            weight = sum(float(each.weight) for each in found) or 1.0
            losses.append(torch.tensor(sum(float(each.loss.detach()) for each in found) / weight))
            figures[f"agreement_{depth}"] = sum(float(each.agreement) for each in found) / weight
        return {"loss": float(self._joined(losses)), **figures}


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the target's most likely token is found, as ``count_accepted`` takes it."""

    hits: list[torch.Tensor]
    follows: torch.Tensor
    logits: list[torch.Tensor]
    """Logits of each depth."""
    columns: list[torch.Tensor]
    """Column of the target's most likely token in each depth's logits; -1: it has none."""


def _from(view: TargetView, first: int) -> TargetView:
    return TargetView(view.log_probs[first:], view.column[first:], view.is_known[first:])


def _joined_view(views: Sequence[TargetView]) -> TargetView:
    if len(views) == 1:
        return views[0]
    return TargetView(
        torch.cat([view.log_probs for view in views]),
        torch.cat([view.column for view in views]),
        torch.cat([view.is_known for view in views]),
    )
