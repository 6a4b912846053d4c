"""Reads checkpoints of block drafters: DFlash (arXiv 2602.06036) and DSpark (2607.05147).

DFlash is found by ``hidden_norm`` after ``fc``: its layers read joined residuals of the target as context.
DSpark is DFlash with a Markov head, a confidence head, or both. Written by their authors, by SpecForge, and
by speculators; with a vocabulary of their own or the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.features.base import TargetShape
from specray.engine.features.block.attention import BlockReach
from specray.engine.features.block.heads import (
    MarkovTensors,
    read_confidence,
    read_markov,
)
from specray.engine.features.decoder_layers import (
    WeightAndBias,
    count_layers,
    read_attention,
    read_layer,
    read_linear,
    sliding_layers,
    window_size,
)
from specray.engine.features.files import DrafterFiles
from specray.engine.features.layers import read_block_layers
from specray.engine.features.layout import DecoderLayout
from specray.engine.features.vocabulary import read_embedding, read_head, read_mask_id

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^logit_head\."), ""),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
)
"""Beginnings of names, and what others call them."""
_DSPARK = "dspark"
_NAMES = ("dflash", _DSPARK)
HEAD_ROWS = 128
"""Rows that the head computes at once, so that its weights are read once for several draft tokens."""
_ANCHOR_FIELDS = ("sample_from_anchor", "shift_label")
"""Fields that say the same: whether the last token's own row draws, as row j then stands for token j + 1."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "is_neox_style": (True,),
    "partial_rotary_factor": (1,),
    "proposal_hidden_offset": (0,),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "projector_type": ("dflash", _DSPARK, None),
    "pure_draft_prefix_len": (0, None),
}
"""Fields of the configuration that change what is computed, and the values that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(DecoderLayout):
    """A checkpoint of a block drafter."""

    hidden_norm: torch.Tensor
    """Norm after ``fc``."""
    reaches: tuple[BlockReach, ...]
    """What the rows of each layer see."""
    norm: torch.Tensor
    """Norm before the head."""
    block_size: int
    """Rows of a block: the last token, and masks."""
    first_row: int
    """Row of a block that draws the first draft token: 0 is that of the last token."""
    mask_id: int
    mask_embedding: torch.Tensor | None
    """Embedding of masks; None: that of the mask token."""
    markov: MarkovTensors | None
    confidence: WeightAndBias | None

    @property
    def num_weights(self) -> int:
        markov = 0 if self.markov is None else self.markov.num_weights
        return self.num_decoder_weights + markov

    @property
    def one_pass_kind(self) -> str | None:
        return "a DFlash or DSpark drafter"

    def logit_bytes(self, max_num_seqs: int, vocab_size: int) -> int:
        """Bytes of the float32 logits computed at once; ``vocab_size``: of the target."""
        num_logits = vocab_size if self.token_ids is None else len(self.token_ids)
        return 4 * max(HEAD_ROWS, max_num_seqs) * num_logits


def is_block(files: DrafterFiles) -> bool:
    """Whether the tensors are those of a block drafter, under whichever names, or it is called one."""
    is_called = any(each in name for name in _called(files) for each in _NAMES)
    return is_called or any(_canonical(name) == "hidden_norm.weight" for name in files.tensors)


def _called(files: DrafterFiles) -> list[str]:
    config = files.config
    named = config.get("architectures")
    names = [config.get("speculators_model_type"), *(named if isinstance(named, list) else [])]
    return [str(name).lower() for name in names]


def _canonical(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def read_block(files: DrafterFiles, target: TargetShape) -> BlockLayout:
    """Reads a block drafter of any layout. ConfigError names the tensor or field that does not fit."""
    files.rename(_canonical)
    layout = _BlockReader(files, target).read()
    files.check_all_taken("DFlash" if layout.markov is None and layout.confidence is None else "DSpark")
    return layout


class _BlockReader:
    """Takes the tensors of one checkpoint."""

    def __init__(self, files: DrafterFiles, target: TargetShape) -> None:
        self._files = files
        self._target = target
        self._section = files.section("transformer_layer_config") or files.config
        self._sections = (files.section("dflash_config"), files.config, self._section)
        """Sections of the configuration, the surest first."""

    def read(self) -> BlockLayout:
        files, target = self._files, self._target
        for field, allowed in _ONLY.items():
            if (value := self._value(field, allowed[0])) not in allowed:
                raise files.refuse(f"{field} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        hidden, width = files.shape("fc.weight")
        attention = read_attention(files, self._section)
        num_layers = count_layers(files)
        token_ids, head, order = read_head(files, hidden, target)
        num_logits = target.vocab_size if token_ids is None else len(token_ids)
        markov = read_markov(files, hidden, target, num_logits, order)
        confidence = read_confidence(files, hidden, markov)
        is_dspark = markov is not None or confidence is not None or self._is_called_dspark()
        first_row, block_size = self._rows(is_dspark=is_dspark)
        if is_dspark:
            # It is stored and not used: masks have the embedding of their token.
            files.pass_over(["mask_embedding"])
        mask = None if is_dspark else self._mask_embedding(hidden)
        return BlockLayout(
            path=files.path,
            feature_layers=self._feature_layers(width, num_layers),
            hidden_size=hidden,
            attention=attention,
            fc=read_linear(files, "fc", hidden, width),
            hidden_norm=files.take("hidden_norm.weight", hidden),
            layers=tuple(read_layer(files, index, hidden, attention) for index in range(num_layers)),
            reaches=self._reaches(num_layers, is_dspark=is_dspark),
            norm=files.take("norm.weight", hidden),
            embedding=read_embedding(files, hidden, target),
            head=head,
            token_ids=token_ids,
            block_size=block_size,
            first_row=first_row,
            mask_id=0 if mask is not None else read_mask_id(files, self._sections, target.vocab_size),
            mask_embedding=mask,
            markov=markov,
            confidence=confidence,
            logit_scale=files.scale("logit_scale", self._value("logit_scale", None)),
        )

    def _value(self, name: str, default: Any) -> Any:
        found = [section[name] for section in self._sections if section.get(name) is not None]
        return found[0] if found else default

    def _feature_layers(self, width: int, num_layers: int) -> tuple[int, ...]:
        files, given = self._files, self._value("target_hidden_size", None)
        num_read = files.num_features(width, self._target.hidden_size, given)
        return read_block_layers(files, self._target.num_layers, num_read)

    def _rows(self, *, is_dspark: bool) -> tuple[int, int]:
        """The row that draws first, and rows in all."""
        files = self._files
        first_row = 0 if self._draws_from_anchor(default=is_dspark) else 1
        size = self._value("block_size", None)
        if type(size) is not int or size <= first_row:
            raise files.refuse(f"block_size is {size!r}; allowed: a whole number above {first_row}")
        verified = self._value("verification_block_size", size)
        if verified != size:
            raise files.refuse(f"verification_block_size is {verified!r}; allowed: {size}, the block_size")
        return first_row, size

    def _is_called_dspark(self) -> bool:
        """DeepSpec's drafters without a Markov and a confidence head have no tensor that tells them."""
        return self._value("projector_type", None) == _DSPARK or any(
            _DSPARK in name for name in _called(self._files)
        )

    def _draws_from_anchor(self, *, default: bool) -> bool:
        """Whether the last token's own row draws. Raises ConfigError where fields contradict each other."""
        given = [
            (name, section[name])
            for name in _ANCHOR_FIELDS
            for section in self._sections
            if section.get(name) is not None
        ]
        for name, value in given:
            if type(value) is not bool:
                raise self._files.refuse(f"{name} is {value!r}; allowed: true or false")
        first = given[0] if given else ("", default)
        for name, value in given:
            if value != first[1]:
                raise self._files.refuse(f"{name} is {value} and {first[0]} {first[1]}; allowed: the same")
        return first[1]

    def _mask_embedding(self, hidden: int) -> torch.Tensor | None:
        files, name = self._files, "mask_embedding"
        tensor = files.tensors.get(name)
        if tensor is None:
            return None
        shape = tuple(tensor.shape) if tensor.numel() == hidden else (hidden,)
        return files.take(name, *shape).reshape(1, hidden)

    def _reaches(self, num_layers: int, *, is_dspark: bool) -> tuple[BlockReach, ...]:
        files, merged = self._files, dict[str, Any]()
        for section in reversed(self._sections):
            merged |= {name: value for name, value in section.items() if value is not None}
        # The type of the layers is their section's, whatever the drafter's own is.
        merged["model_type"] = self._section.get("model_type")
        uses_window = bool(self._value("use_swa", False))
        if uses_window and merged.get("layer_types") is None:
            are_sliding: tuple[bool, ...] = (False,) * num_layers
        else:
            are_sliding = sliding_layers(files, merged, num_layers)
        # Whether a row sees later ones follows from method and layer, unless a field says it: DFlash's
        # layers with windows are causal, DSpark's are not.
        is_default_causal = self._value("sliding_window_non_causal", is_dspark) is not True
        is_causal = self._value("is_causal", self._value("causal", None))
        uses_window = uses_window and not any(are_sliding)
        window = self._value("swa_window_size", self._value("sliding_window", None))
        return tuple(
            BlockReach(
                window_size(files, window) if is_sliding or uses_window else None,
                is_sliding and is_default_causal if is_causal is None else bool(is_causal),
            )
            for is_sliding in are_sliding
        )
