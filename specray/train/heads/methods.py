"""The methods that are trained: options of each, and the head that they make for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from specray.errors import ConfigError
from specray.train.draft.markers import TurnMarkers
from specray.train.draft.vocabulary import frequent_ids
from specray.train.draft.writing import Written
from specray.train.heads.base import DraftHead, default_layers, text_section, whole_number
from specray.train.heads.block import BlockHead
from specray.train.heads.eagle import EagleHead
from specray.train.heads.loading import loaded_draft
from specray.train.heads.medusa import MedusaHeads
from specray.train.heads.pard import PardDraft
from specray.train.heads.peagle import ParallelEagleHead
from specray.train.heads.target import FeatureReader, usual_sizes
from specray.train.optim import OptimizerConfig

_FROM_NOTHING = OptimizerConfig(matrix_learning_rate=4e-3, learning_rate=6e-4, weight_decay=0.02)
"""Learning rates of heads that begin with random weights."""
_TUNED = OptimizerConfig(matrix_learning_rate=1e-3, learning_rate=3e-4, weight_decay=0.0)
"""Learning rates of a model that was trained before."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a head is made for."""

    model: Any
    """Model of transformers."""
    tokenizer: Any
    markers: TurnMarkers | None
    written: Written
    """Rows to train on."""
    work_dir: Path
    seed: int

    @property
    def num_layers(self) -> int:
        return whole_number(text_section(self.model.config), "num_hidden_layers")

    @property
    def default_layers(self) -> tuple[int, ...]:
        return default_layers(self.num_layers)

    def sizes(self) -> torch.Tensor:
        """Usual sizes of what a head reads of the default layers, on some rows of the text."""
        # Rows of text over which the sizes of features are measured.
        layers, token_ids = self.default_layers, self.written.token_ids[:8].astype(np.int64)
        on_device = torch.from_numpy(token_ids).to(self.model.device)
        return usual_sizes(FeatureReader(self.model, layers), layers, on_device)

    def placed(self, head: EagleHead | MedusaHeads | BlockHead) -> DraftHead:
        """The head on the target's device, in its type."""
        return head.to(device=self.model.device, dtype=self.model.dtype)

    @property
    def vocab_size(self) -> int:
        return len(self.model.get_output_embeddings().weight)

    @property
    def special_ids(self) -> set[int]:
        """Tokens that have a meaning of their own, and those around turns."""
        marked = () if self.markers is None else (*self.markers.to_assistant, *self.markers.to_user)
        return {each for each in (*self.tokenizer.all_special_ids, *marked) if each < self.vocab_size}


@dataclass(frozen=True, slots=True)
class Eagle3:
    """An EAGLE-3 head."""

    name: ClassVar[str] = "eagle3"
    title: ClassVar[str] = "An EAGLE-3 head"
    rows_per_forward: ClassVar[int] = 2
    is_draft: ClassVar[bool] = False
    optimizer: ClassVar[OptimizerConfig] = _FROM_NOTHING
    num_depths: int = 4
    vocabulary_share: float = 0.98
    """Share of the target's text that its tokens cover."""
    max_draft_vocabulary: int = 12_288

    def make(self, target: Target) -> DraftHead:
        head = EagleHead(
            target.model,
            draft_ids(self.name, target, self.vocabulary_share, self.max_draft_vocabulary),
            feature_layers=target.default_layers,
            num_depths=self.num_depths,
            seed=target.seed,
            sizes=target.sizes(),
        )
        return target.placed(head)


@dataclass(frozen=True, slots=True)
class PEagle(Eagle3):
    """An EAGLE-3 head with masks."""

    name: ClassVar[str] = "peagle"
    title: ClassVar[str] = "An EAGLE-3 head that predicts all draft tokens at once (P-EAGLE)"
    rows_per_forward: ClassVar[int] = 1
    keep_rate: float = 0.7
    """Share of the masks of a depth that the next one retains."""
    min_kept: float = 0.2
    """Least share of a row's tokens after which a depth is trained."""

    def make(self, target: Target) -> DraftHead:
        head = ParallelEagleHead(
            target.model,
            draft_ids(self.name, target, self.vocabulary_share, self.max_draft_vocabulary),
            feature_layers=target.default_layers,
            num_depths=self.num_depths,
            mask_id=mask_token(self.name, target, target.vocab_size, None),
            keep_rate=self.keep_rate,
            min_kept=self.min_kept,
            seed=target.seed,
            sizes=target.sizes(),
        )
        return target.placed(head)


@dataclass(frozen=True, slots=True)
class Medusa:
    """Medusa heads."""

    name: ClassVar[str] = "medusa"
    title: ClassVar[str] = "Medusa heads"
    rows_per_forward: ClassVar[int] = 1
    is_draft: ClassVar[bool] = False
    optimizer: ClassVar[OptimizerConfig] = _FROM_NOTHING
    num_depths: int = 4

    def make(self, target: Target) -> DraftHead:
        return target.placed(MedusaHeads(target.model, num_depths=self.num_depths))


@dataclass(frozen=True, slots=True)
class Block:
    """A block drafter."""

    name: ClassVar[str] = "block"
    title: ClassVar[str] = "A block drafter"
    rows_per_forward: ClassVar[int] = 1
    is_draft: ClassVar[bool] = False
    optimizer: ClassVar[OptimizerConfig] = _FROM_NOTHING
    num_depths: int = 7
    num_layers: int = 2
    has_confidence: bool = False
    anchor_share: float = 0.125
    """Share of a row's tokens after which a step trains a block."""
    mask_token: int | None = None
    """Token that stands for one to be drafted; None: one that is not written."""

    def make(self, target: Target) -> DraftHead:
        head = BlockHead(
            target.model,
            feature_layers=target.default_layers,
            num_layers=self.num_layers,
            num_depths=self.num_depths,
            mask_id=mask_token(self.name, target, target.vocab_size, self.mask_token),
            has_confidence=self.has_confidence,
            anchor_share=self.anchor_share,
            seed=target.seed,
            sizes=target.sizes(),
        )
        return target.placed(head)


@dataclass(frozen=True, slots=True)
class Pard:
    """A draft model with a mask token."""

    name: ClassVar[str] = "pard"
    title: ClassVar[str] = "A draft model that predicts all draft tokens at once (PARD)"
    rows_per_forward: ClassVar[int] = 1
    is_draft: ClassVar[bool] = True
    optimizer: ClassVar[OptimizerConfig] = _TUNED
    draft: str
    """Checkpoint that it begins as."""
    num_depths: int = 8
    keep_rate: float = 0.7
    """Share of the masks of a depth that the next one retains."""
    min_kept: float = 0.2
    """Least share of a row's tokens after which a depth is trained."""
    mask_token: int | None = None
    """Token that stands for one to be drafted; None: one that is not written."""

    def make(self, target: Target) -> DraftHead:
        """The draft of a run, as it begins.

        Raises:
            ConfigError: it cannot be loaded, or has another tokenizer than the target.
        """
        draft, tokenizer, token_ids = loaded_draft(self.draft, target.model.dtype)
        if tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ConfigError(
                f"draft {self.draft!r} has another tokenizer than the target; allowed: the same tokens"
            )
        draft.to(target.model.device)
        return PardDraft(
            draft,
            vocab_size=target.vocab_size,
            num_depths=self.num_depths,
            mask_id=mask_token(self.name, target, len(draft.get_input_embeddings().weight), self.mask_token),
            keep_rate=self.keep_rate,
            min_kept=self.min_kept,
            row_len=target.written.token_ids.shape[1],
            token_ids=token_ids,
        )


Method = Eagle3 | PEagle | Medusa | Block | Pard


def draft_ids(name: str, target: Target, share: float, max_num_ids: int) -> torch.Tensor:
    """The tokens that a head proposes, ascending: those of the first call, as others would change its rows.

    Args:
        name: of the method.
        share: of the target's answers, which they cover.
        max_num_ids: most of them.
    """
    file = target.work_dir / f"{name}.ids.npy"
    if not file.exists():
        written = target.written
        answers = written.token_ids[written.is_answer]
        always = sorted(target.special_ids)
        np.save(file, frequent_ids(answers, share=share, max_num_ids=max_num_ids, always=always))
    return torch.from_numpy(np.load(file)).to(target.model.device)


def mask_token(name: str, target: Target, vocab_size: int, given: int | None) -> int:
    """The mask of a run: the one given, or that of the first call, or one that the target does not write.

    Args:
        name: of the method.
        vocab_size: rows of the embedding that the mask is looked up in.

    Raises:
        ConfigError: the one given is no token, or one with a meaning of its own.
    """
    file = target.work_dir / f"{name}.mask.json"
    if given is None and file.exists():
        return int(json.loads(file.read_text("utf-8")))
    if given is not None and (not 0 <= given < vocab_size or given in target.special_ids):
        raise ConfigError(
            f"mask_token is {given}; allowed: 0..{vocab_size - 1} but {sorted(target.special_ids)}, which "
            "have a meaning"
        )
    found = _unused_token(target, vocab_size) if given is None else given
    file.write_text(json.dumps(found), "utf-8")
    return found


def _unused_token(target: Target, vocab_size: int) -> int:
    """A row of the embedding without a token, or else the rarest token; of several the last."""
    num_tokens = len(target.tokenizer)
    if num_tokens < vocab_size:
        return num_tokens
    counts = np.bincount(target.written.token_ids.reshape(-1), minlength=vocab_size)[:vocab_size]
    counts[sorted(target.special_ids)] = counts.max() + 1
    return len(counts) - 1 - int(counts[::-1].argmin())
