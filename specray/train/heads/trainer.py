"""Steps and held-out figures of a head: its loss by depth against the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from specray.train.draft.loss import DraftLoss, LossConfig, LossWeights, TargetProbs, view_loss
from specray.train.draft.text import DeviceRows
from specray.train.draft.writing import Written
from specray.train.heads.acceptance import (
    DepthCounts,
    count_accepted,
    count_ranks,
    places_of,
    rank_rates,
    tokens_per_round,
)
from specray.train.heads.base import DraftHead, DraftRows, all_anchors, is_range
from specray.train.heads.target import ReadRows, TargetReadings
from specray.train.loop import RunState
from specray.train.optim import MasterOptimizer

_IN_BAR = "held_out_tokens_per_round"
"""Name of the held-out figure that a step's figures repeat."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Options of training steps."""

    rows_per_step: int = 16
    rows_per_forward: int = 1
    depth_decay: float = 0.8
    """Factor of the loss from one depth to the next."""
    loss: LossConfig = field(default_factory=LossConfig)
    confidence_weight: float = 1.0
    """Weight of a confidence head's cross-entropy with the acceptance."""
    other_weight: float = 0.1
    """Weight of tokens that no server would generate: what is given, and the user's turns."""
    seed: int = 0


class HeadTrainer:
    """Steps a head over rows that its target has written.

    Args:
        readings: the target over rows of text, as the head reads it.
        written: rows to train on.
        optimizer: of the head.
    """

    def __init__(
        self,
        readings: TargetReadings,
        head: DraftHead,
        written: Written,
        config: StepConfig,
        optimizer: MasterOptimizer,
        device: torch.device,
    ) -> None:
        self._readings = readings
        self._head = head
        self._config = config
        self._device = device
        self._rows = DeviceRows(written, device)
        self._decays = [config.depth_decay**depth for depth in range(head.num_depths)]
        self._optimizer = optimizer
        self.held_out: dict[str, float] = {}
        """Figures of the last evaluation."""
        self.domains: dict[str, list[DepthCounts]] = {}
        """Acceptance of the last evaluation, by domain and depth."""

    def step(self, state: RunState, progress: float) -> dict[str, float]:
        """One step; returns its figures, and the last held-out tokens of a round."""
        config = self._config
        ids, is_answer = self._rows.picked(state.cursor, config.rows_per_step, seed=config.seed)
        # What is chosen follows from the place in the text: a run that goes on chooses the same.
        seed = int(np.random.default_rng((config.seed, state.cursor)).integers(1 << 62))
        generator = torch.Generator().manual_seed(seed)
        anchors = [
            [each.to(self._device) for each in self._head.trained_anchors(ids.shape[1] - 1, generator)]
            for _ in range(0, len(ids), config.rows_per_forward)
        ]
        weights = torch.where(is_answer, 1.0, config.other_weight)
        totals = self._totals(weights, anchors)
        parts = []
        for own_ids, own_weights, own_anchors in zip(
            torch.split(ids, config.rows_per_forward),
            torch.split(weights, config.rows_per_forward),
            anchors,
            strict=True,
        ):
            losses, _ = self._losses(
                own_ids, own_weights, own_anchors, config.loss.at(progress), has_confidence=True
            )
            means = [each.loss / total for each, total in zip(losses, totals, strict=True)]
            self._joined(means).backward()  # type: ignore[no-untyped-call]
            parts.append(losses)
        norm = self._optimizer.step(progress)
        state.cursor += len(ids)
        state.num_tokens += ids.numel()
        last = {_IN_BAR: self.held_out[_IN_BAR]} if _IN_BAR in self.held_out else {}
        return {**self._means(parts), "grad_norm": norm, **last}

    @torch.no_grad()
    def evaluate(self, held_out: Written) -> dict[str, float]:
        """Loss, and acceptance by depth, on answers that were not trained on."""
        parts: list[list[DraftLoss]] = []
        ranks: list[torch.Tensor] = []
        self.domains = {}
        for domain in sorted(set(held_out.domains.tolist())):
            totals = self.domains[domain] = [DepthCounts() for _ in self._decays]
            own = held_out[held_out.domains == domain]
            for ids, is_answer in DeviceRows(own, self._device).split(self._config.rows_per_forward):
                losses, drafted, seen = self._evaluated(ids, is_answer)
                parts.append(losses)
                for total, found in zip(
                    totals, count_accepted(seen.hits, seen.follows, is_answer), strict=True
                ):
                    total.add(found)
                if self._head.rank_acceptance is not None:
                    places = places_of(seen.follows, is_answer, len(self._decays))
                    ranks.append(count_ranks([rows.logits for rows in drafted], seen.columns, places))
        if ranks:
            self._head.rank_acceptance = rank_rates(torch.stack(ranks).sum(0))
        self.held_out = {f"held_out_{name}": value for name, value in self._figures(parts).items()}
        return self.held_out

    def _evaluated(
        self, ids: torch.Tensor, is_answer: torch.Tensor
    ) -> tuple[list[DraftLoss], Sequence[DraftRows], _Seen]:
        anchors = [each.to(self._device) for each in all_anchors(ids.shape[1] - 1, len(self._decays))]
        weights = torch.where(is_answer, 1.0, 0.0)
        losses, forward = self._losses(
            ids, weights, anchors, self._config.loss.held_out, has_confidence=False
        )
        return losses, forward.drafted, self._seen(ids, anchors, forward)

    def _figures(self, parts: list[list[DraftLoss]]) -> dict[str, float]:
        totals = [DepthCounts() for _ in self._decays]
        for counts in self.domains.values():
            for total, found in zip(totals, counts, strict=True):
                total.add(found)
        by_domain = {
            f"tokens_per_round_{domain}": tokens_per_round(counts) for domain, counts in self.domains.items()
        }
        return {
            **self._means(parts),
            **{f"accepted_{depth}": total.rate for depth, total in enumerate(totals, 1)},
            "tokens_per_round": tokens_per_round(totals),
            **by_domain,
        }

    def _losses(
        self,
        ids: torch.Tensor,
        weights: torch.Tensor,
        anchors: Sequence[torch.Tensor],
        loss: LossWeights,
        *,
        has_confidence: bool,
    ) -> tuple[list[DraftLoss], _Forward]:
        """The loss of each depth, and its forward; ``weights`` are of each token, ``[num_rows, length]``."""
        # What the target's row i says is of token i + 1.
        target = self._readings.read(ids[:, :-1])
        features = {layer: rows[:, :-1] for layer, rows in target.features.items()}
        drafted = self._head.unroll(features, ids[:, :-1], anchors)
        losses = []
        for depth, (rows, own) in enumerate(zip(drafted, anchors, strict=True)):
            # Depth s of anchor q drafts token q + 2 + s.
            places = _Places(own, 1 + depth)
            own_weights = places.of(weights[:, 1:]).flatten()
            found = view_loss(places.view(target.views), rows.logits.flatten(0, 1), own_weights, loss)
            if has_confidence and rows.confidence is not None:
                judged = _judged(rows.confidence.flatten(), found.row_overlaps, own_weights)
                found.loss = found.loss + self._config.confidence_weight * judged
            losses.append(found)
        return losses, _Forward(target, drafted)

    def _seen(self, ids: torch.Tensor, anchors: Sequence[torch.Tensor], forward: _Forward) -> _Seen:
        """Where the head and the text agree with the target."""
        best, hits, columns = forward.target.best, [], []
        for depth, (rows, own) in enumerate(zip(forward.drafted, anchors, strict=True)):
            places = _Places(own, 1 + depth)
            view = places.view(forward.target.views)
            hits.append(self._head.draft_ids[rows.logits.argmax(-1)] == places.of(best))
            columns.append(torch.where(view.is_known, view.column, -1).view(len(ids), -1))
        follows = torch.cat((ids.new_zeros(len(ids), 1, dtype=torch.bool), best == ids[:, 1:]), 1)
        return _Seen(hits, follows, columns)

    def _totals(self, weights: torch.Tensor, anchors: Sequence[Sequence[torch.Tensor]]) -> list[float]:
        """The weight of all tokens that are drafted at each depth of a step."""
        totals = [0.0] * len(self._decays)
        for part, by_depth in zip(
            torch.split(weights[:, 1:], self._config.rows_per_forward), anchors, strict=True
        ):
            for depth, own in enumerate(by_depth):
                totals[depth] += float(_Places(own, 1 + depth).of(part).sum())
        return [max(total, 1e-6) for total in totals]

    def _joined(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum(value * decay for value, decay in zip(values, self._decays, strict=True))
        return torch.as_tensor(total) / sum(self._decays)

    def _means(self, parts: list[list[DraftLoss]]) -> dict[str, float]:
        losses, figures = [], {}
        for depth, found in enumerate(zip(*parts, strict=True), 1):
            weight = sum(float(each.weight) for each in found) or 1.0
            losses.append(torch.tensor(sum(float(each.loss.detach()) for each in found) / weight))
            figures[f"agreement_{depth}"] = sum(float(each.agreement) for each in found) / weight
        return {"loss": float(self._joined(losses)), **figures}


@dataclass(frozen=True, slots=True)
class _Forward:
    target: ReadRows
    drafted: Sequence[DraftRows]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the target's most likely token is found, as ``count_accepted`` takes it."""

    hits: list[torch.Tensor]
    follows: torch.Tensor
    columns: list[torch.Tensor]
    """Column of the target's most likely token in each depth's logits; -1: it has none."""


class _Places:
    """Rows of the target that anchors are compared with; without a copy where they lie side by side."""

    def __init__(self, anchors: torch.Tensor, shift: int) -> None:
        self._rows: slice | torch.Tensor = anchors + shift
        if is_range(anchors):
            self._rows = slice(shift, shift + len(anchors))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Columns of ``[num_rows, num_tokens]``."""
        return values[:, self._rows]

    def view(self, views: Sequence[TargetProbs]) -> TargetProbs:
        """These rows of all views, concatenated."""
        rows = self._rows
        return _joined_view(
            [TargetProbs(view.log_probs[rows], view.column[rows], view.is_known[rows]) for view in views]
        )


def _judged(confidence: torch.Tensor, overlaps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of the confidence with the acceptance."""
    each = F.binary_cross_entropy_with_logits(confidence.float(), overlaps, reduction="none")
    return (each * weights).sum()


def _joined_view(views: Sequence[TargetProbs]) -> TargetProbs:
    if len(views) == 1:
        return views[0]
    return TargetProbs(
        torch.cat([view.log_probs for view in views]),
        torch.cat([view.column for view in views]),
        torch.cat([view.is_known for view in views]),
    )
