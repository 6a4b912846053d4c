"""Trains a head for a target: the target writes text, and the head learns from its hidden states over it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specray.errors import ConfigError
from specray.train.draft.text import TextConfig, split_held_out, written_text
from specray.train.draft.writing import Written
from specray.train.heads.base import DraftHead
from specray.train.heads.card import Card
from specray.train.heads.loading import Adapt, loaded, markers_of
from specray.train.heads.methods import Method, Target
from specray.train.heads.target import FeatureReader, TargetReadings
from specray.train.heads.trainer import HeadTrainer, StepConfig
from specray.train.loop import RunLimit, TrainingRun
from specray.train.optim import MasterOptimizer


@dataclass(frozen=True, slots=True)
class HeadTrainConfig:
    """Options of a run, whatever the method."""

    limit: RunLimit
    text: TextConfig = field(default_factory=TextConfig)
    steps: StepConfig = field(default_factory=StepConfig)
    evaluate_every_s: float = 600.0
    """Seconds between two evaluations; the head is written each time."""
    readings_gib: float = 4.0
    """GiB of memory for what was read of the target, so that it runs once over each row."""


def train_head(
    method: Method,
    target: str,
    work_dir: Path,
    config: HeadTrainConfig,
    *,
    device: str = "cpu",
    has_bfloat16: bool = True,
    adapt: Adapt | None = None,
    name: str | None = None,
    command: str = "",
    stop_after: int | None = None,
) -> Path:
    """Writes text, trains on it, and writes the head into ``work_dir/METHOD``; goes on where it was.

    Args:
        target: checkpoint of any causal language model of transformers.
        work_dir: directory of the run; the same call again goes on from there. Methods may share one, and
            then its text.
        has_bfloat16: products are bfloat16, otherwise float32; the checkpoint is bfloat16.
        adapt: what is merged into the target's weights; None: nothing.
        name: of the target, for the card and the configuration; None: as ``target``.
        command: for the card.
        stop_after: steps after which this call ends early.

    Returns:
        The head's directory, as ``target.drafter`` takes it, or ``draft.model`` where it is a draft.

    Raises:
        ConfigError: the target cannot be read so, or the directory holds text of another shape.
    """
    if method.num_depths + 2 > config.text.row_len:
        raise ConfigError(f"num_depths is {method.num_depths}; allowed: 1..{config.text.row_len - 2}")
    work_dir.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    made_for, held_out = _written_for(target, work_dir, config, device, dtype, adapt)
    head = method.make(made_for)
    optimizer = MasterOptimizer(head.module, method.optimizer)
    readings = TargetReadings(
        FeatureReader(made_for.model, head.feature_layers),
        head.draft_ids,
        max_bytes=int(config.readings_gib * 2**30),
    )
    trainer = HeadTrainer(readings, head, made_for.written, config.steps, optimizer, made_for.model.device)
    run = TrainingRun(
        method.name, work_dir, optimizer, config.limit, checkpoint_every_s=config.evaluate_every_s
    )
    card = Card(method, config.steps, made_for, name or target, command, len(held_out.token_ids))
    destination = work_dir / method.name

    def export() -> dict[str, float]:
        figures = trainer.evaluate(held_out)
        text = card.text(head, run.state, figures, trainer.domains)
        tokenizer = made_for.tokenizer if method.is_draft else None
        _write_head(head, destination, target=card.target_name, card=text, tokenizer=tokenizer)
        return figures

    run.run(trainer.step, on_checkpoint=export, stop_after=stop_after)
    return destination


def _written_for(
    path: str,
    work_dir: Path,
    config: HeadTrainConfig,
    device: str,
    dtype: torch.dtype,
    adapt: Adapt | None,
) -> tuple[Target, Written]:
    """The target with the text to train on, and the text that is held out."""
    model, tokenizer = loaded(path, dtype, role="target", adapt=adapt)
    model.to(device).train(False)
    markers = markers_of(tokenizer)
    written = written_text(model, tokenizer, work_dir, config.text, markers)
    train, held_out = split_held_out(written)
    return Target(model, tokenizer, markers, train, work_dir, config.steps.seed), held_out


def _write_head(head: DraftHead, directory: Path, *, target: str, card: str, tokenizer: Any = None) -> None:
    """Writes the checkpoint in its authors' layout; what is there is replaced only when all of it is written.

    Args:
        tokenizer: of a draft model; None: it is no model of its own.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {key: _written(tensor) for key, tensor in head.tensors().items()}
    name = "medusa_lm_head.safetensors" if head.name == "medusa" else "model.safetensors"
    save_file(tensors, partial / name, {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(head.config(target), indent=1) + "\n", "utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, "utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.cpu()
    return (own.to(torch.bfloat16) if own.is_floating_point() else own).contiguous()
