"""Trains a head for a target: the target writes text, and the head learns from its hidden states over it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specray.errors import ConfigError
from specray.train.draft.markers import TurnMarkers, turn_markers
from specray.train.draft.text import TextConfig, split_held_out, written_text
from specray.train.draft.vocabulary import frequent_ids
from specray.train.draft.writing import Written
from specray.train.heads.base import Head, default_layers, text_section, whole_number
from specray.train.heads.card import card_text
from specray.train.heads.checkpoint import write_head
from specray.train.heads.eagle import EagleHead
from specray.train.heads.medusa import MedusaHeads
from specray.train.heads.target import FeatureReader
from specray.train.heads.trainer import HeadTrainer, StepConfig
from specray.train.loop import RunLimit, TrainingRun

_log = logging.getLogger(__name__)

Method = Literal["eagle3", "medusa"]


@dataclass(frozen=True, slots=True)
class HeadTrainConfig:
    """Options of a run."""

    limit: RunLimit
    text: TextConfig = field(default_factory=TextConfig)
    steps: StepConfig = field(default_factory=StepConfig)
    num_depths: int = 4
    """Places ahead that are trained; Medusa's number of heads."""
    evaluate_every_s: float = 600.0
    """Seconds between two evaluations; the head is written each time."""
    vocabulary_share: float = 0.98
    """Share of the target's text that EAGLE-3's tokens cover."""
    max_draft_vocabulary: int = 12_288


def train_head(
    method: Method,
    target: str,
    work_dir: Path,
    config: HeadTrainConfig,
    *,
    device: str = "cpu",
    has_bfloat16: bool = True,
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
        name: of the target, for the card and the configuration; None: as ``target``.
        command: for the card.
        stop_after: steps after which this call ends early.

    Returns:
        The head's directory, as ``target.drafter`` takes it.

    Raises:
        ConfigError: the target cannot be read so, or the directory holds text of another shape.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    model, tokenizer = _loaded(target, torch.bfloat16 if has_bfloat16 else torch.float32)
    model.to(device).train(False)
    markers = _markers(tokenizer)
    written = written_text(model, tokenizer, work_dir, config.text, markers)
    if config.num_depths + 2 > config.text.row_len:
        raise ConfigError(f"num_depths is {config.num_depths}; allowed: 1..{config.text.row_len - 2}")
    train, held_out = split_held_out(written)
    if not (train.is_answer[:, 2:].any() and held_out.is_answer[:, 2:].any()):
        raise ConfigError(
            f"num_rows is {len(written.token_ids)}, and they hold no answers to train on or to hold out; "
            "allowed: more rows, or longer ones"
        )
    head = _head(method, model, tokenizer, markers, train, work_dir, config)
    reader = FeatureReader(model, head.feature_layers)
    trainer = HeadTrainer(reader, head, train, config.steps, model.device)
    run = TrainingRun(
        method, work_dir, trainer.optimizer, config.limit, checkpoint_every_s=config.evaluate_every_s
    )
    destination = work_dir / method

    def export() -> dict[str, float]:
        figures = trainer.evaluate(held_out)
        card = card_text(
            head,
            target=name or target,
            command=command,
            vocab_size=len(model.get_output_embeddings().weight),
            num_layers=whole_number(text_section(model.config), "num_hidden_layers"),
            written=train,
            num_held_out=len(held_out.token_ids),
            weights={
                name: getattr(config.steps, name)
                for name in ("argmax_weight", "overlap_weight", "depth_decay")
            },
            log=work_dir / f"{method}.log.jsonl",
            state=run.state,
            figures=figures,
        )
        write_head(head, destination, target=name or target, card=card)
        return figures

    run.run(trainer.step, on_checkpoint=export, stop_after=stop_after)
    return destination


def _loaded(target: str, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"target {target!r} cannot be loaded by transformers: {reason}") from error


def _markers(tokenizer: Any) -> TurnMarkers | None:
    try:
        return turn_markers(tokenizer)
    except ConfigError as error:
        _log.warning("%s: it writes no conversations", error)
        return None


def _head(
    method: Method,
    model: Any,
    tokenizer: Any,
    markers: TurnMarkers | None,
    train: Written,
    work_dir: Path,
    config: HeadTrainConfig,
) -> Head:
    if method == "medusa":
        heads = MedusaHeads(model, num_depths=config.num_depths)
        return heads.to(device=model.device, dtype=model.dtype)
    ids = torch.from_numpy(_draft_ids(model, tokenizer, markers, train, work_dir, config)).to(model.device)
    head = EagleHead(
        model,
        ids,
        feature_layers=default_layers(whole_number(text_section(model.config), "num_hidden_layers")),
        num_depths=config.num_depths,
        seed=config.steps.seed,
    )
    return head.to(device=model.device, dtype=model.dtype)


def _draft_ids(
    model: Any,
    tokenizer: Any,
    markers: TurnMarkers | None,
    train: Written,
    work_dir: Path,
    config: HeadTrainConfig,
) -> Any:
    """Those of the first call: more text would change them, and what the head's rows mean."""
    file = work_dir / "eagle3.ids.npy"
    if not file.exists():
        vocab_size = len(model.get_output_embeddings().weight)
        marked = () if markers is None else (*markers.to_assistant, *markers.to_user)
        ids = frequent_ids(
            train.token_ids[train.is_answer],
            share=config.vocabulary_share,
            max_num_ids=config.max_draft_vocabulary,
            always=sorted({each for each in (*tokenizer.all_special_ids, *marked) if each < vocab_size}),
        )
        np.save(file, ids)
    return np.load(file)
