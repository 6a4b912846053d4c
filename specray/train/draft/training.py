"""Trains a draft for a chat model: the model writes text, and the draft learns its distribution over it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specray.train.draft.loss import DraftLoss, LossConfig, LossWeights, draft_loss
from specray.train.draft.markers import turn_markers
from specray.train.draft.student import DraftShape, Student, write_compact
from specray.train.draft.text import DeviceRows, TextConfig, split_held_out, written_text
from specray.train.draft.vocabulary import frequent_ids
from specray.train.draft.writing import Written
from specray.train.heads.loading import Adapt, loaded
from specray.train.loop import RunLimit, RunState, TrainingRun
from specray.train.optim import MasterOptimizer, OptimizerConfig


@dataclass(frozen=True, slots=True)
class DraftTrainConfig:
    """Options of a run."""

    limit: RunLimit
    text: TextConfig = field(default_factory=TextConfig)
    rows_per_step: int = 16
    rows_per_forward: int = 4
    long_share: float = 0.2
    """Share of the run, its end, in which three rows make one, so that later positions are learnt."""
    shape: DraftShape = field(default_factory=DraftShape)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            matrix_learning_rate=6e-3, learning_rate=3e-3, weight_decay=0.02
        )
    )
    vocabulary_share: float = 0.98
    max_draft_vocabulary: int = 12_288
    loss: LossConfig = field(default_factory=LossConfig)
    other_weight: float = 0.1
    """Weight of tokens that no server would generate: what is given, and the user's turns."""
    seed: int = 0


def train_draft(
    target: str,
    work_dir: Path,
    config: DraftTrainConfig,
    *,
    device: str = "cpu",
    has_bfloat16: bool = True,
    adapt: Adapt | None = None,
) -> Path:
    """Writes text, trains on it, and writes the compact draft into ``work_dir/draft``; goes on where it was.

    Args:
        target: checkpoint of a causal language model of transformers with a chat template.
        work_dir: directory of the run; the same call again goes on from there.
        has_bfloat16: products are bfloat16, otherwise float32; the checkpoint is bfloat16.
        adapt: what is merged into the target's weights; None: nothing.

    Returns:
        The directory of the draft.

    Raises:
        ConfigError: the target cannot be read so, or the directory holds text or a draft of another shape.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    model, tokenizer = loaded(target, dtype, role="target", adapt=adapt)
    model.to(device).train(False)
    markers = turn_markers(tokenizer)
    written = written_text(model, tokenizer, work_dir, config.text, markers)
    train, held_out = split_held_out(written)
    answers = train.token_ids[train.is_answer]
    always = sorted({*tokenizer.all_special_ids, *markers.to_assistant, *markers.to_user})
    ids = frequent_ids(
        answers, share=config.vocabulary_share, max_num_ids=config.max_draft_vocabulary, always=always
    )
    student = Student(
        config.shape, model.get_input_embeddings().weight, torch.from_numpy(ids).to(device), seed=config.seed
    ).to(device)
    trainer = _Trainer(model, student, train, config)
    run = TrainingRun("draft", work_dir, trainer.optimizer, config.limit)
    destination = work_dir / "draft"

    def export() -> dict[str, float]:
        figures = trainer.evaluate(held_out)
        write_compact(student, destination, {**_summary(config, written, len(ids)), **figures})
        return figures

    run.run(trainer.step, on_checkpoint=export)
    return destination


class _Trainer:
    def __init__(
        self, target: PreTrainedModel, student: Student, written: Written, config: DraftTrainConfig
    ) -> None:
        self._target = target
        self._student = student
        self._config = config
        self._rows = DeviceRows(written, target.device)
        self.optimizer = MasterOptimizer(student, config.optimizer)

    def step(self, state: RunState, progress: float) -> dict[str, float]:
        count = -(-self._config.rows_per_step // 3) * 3
        ids, is_answer = self._rows.picked(state.cursor, count, seed=self._config.seed)
        if progress >= 1 - self._config.long_share:
            ids, is_answer = (part.reshape(count // 3, -1) for part in (ids, is_answer))
        per_forward = max(1, self._config.rows_per_forward * self._config.text.row_len // ids.shape[1])
        weight = self._weights(is_answer).sum()
        parts = []
        for own_ids, own_answers in zip(
            torch.split(ids, per_forward), torch.split(is_answer, per_forward), strict=True
        ):
            part = self._loss(own_ids, own_answers, self._config.loss.at(progress))
            (part.loss / weight).backward()  # type: ignore[no-untyped-call]
            parts.append(part)
        norm = self.optimizer.step(progress)
        state.cursor += count
        state.num_tokens += ids.numel()
        return {**_means(parts), "grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, held_out: Written) -> dict[str, float]:
        """Returns agreement and overlap on answers that were not trained on."""
        rows = DeviceRows(held_out, self._target.device)
        parts = [
            self._loss(ids, is_answer, self._config.loss.held_out, other_weight=0.0)
            for ids, is_answer in rows.split(self._config.rows_per_forward)
        ]
        return {f"held_out_{name}": value for name, value in _means(parts).items()}

    def _loss(
        self,
        ids: torch.Tensor,
        is_answer: torch.Tensor,
        parts: LossWeights,
        *,
        other_weight: float | None = None,
    ) -> DraftLoss:
        with torch.no_grad():
            target_logits = self._target(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
        return draft_loss(
            target_logits,
            self._student(ids[:, :-1]).flatten(0, 1),
            self._student.draft_ids,
            self._weights(is_answer, other_weight).flatten(),
            parts,
        )

    def _weights(self, is_answer: torch.Tensor, other_weight: float | None = None) -> torch.Tensor:
        """A position's weight is that of the token that it predicts."""
        others = self._config.other_weight if other_weight is None else other_weight
        return torch.where(is_answer[:, 1:], 1.0, others)


def _means(parts: list[DraftLoss]) -> dict[str, float]:
    weight = float(sum(float(part.weight) for part in parts)) or 1.0
    names = ("loss", "agreement", "overlap")
    return {name: sum(float(getattr(part, name).detach()) for part in parts) / weight for name in names}


def _summary(config: DraftTrainConfig, written: Written, draft_vocab_size: int) -> dict[str, Any]:
    return {
        "config": asdict(config),
        "num_rows_written": len(written.token_ids),
        "num_tokens_written": int(written.token_ids.size),
        "num_answer_tokens": int(written.is_answer.sum()),
        "draft_vocab_size": draft_vocab_size,
    }
