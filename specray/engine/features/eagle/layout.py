"""Reads EAGLE checkpoints, whoever wrote them: what a drafter computes follows from its tensors and flags.

EAGLE-3 heads are found as ``midlayer.*`` (the authors', SGLang, SpecForge, NVIDIA) and as ``layers.0.*``
(vLLM, speculators); with a vocabulary of their own or the target's; with or without embedding and head.
EAGLE-1 and 2 have one layer after ``fc``, no norm before it, and the target's head. P-EAGLE is EAGLE-3 with
``mask_hidden``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.features.base import TargetShape
from specray.engine.features.decoder_layers import (
    WeightAndBias,
    count_layers,
    read_attention,
    read_layer,
    read_linear,
    read_windows,
)
from specray.engine.features.files import DrafterFiles
from specray.engine.features.layers import read_layers
from specray.engine.features.layout import DecoderLayout
from specray.engine.features.vocabulary import read_embedding, read_head, read_mask_id

_log = logging.getLogger(__name__)

_UNREAD = re.compile(r"(^|\.)(mask_embedding|markov\w*|confidence\w*|conv\w*)")
"""Tensors of drafters that draft a block at once."""


@dataclass(frozen=True, slots=True)
class MaskInput:
    """What stands in the place of draft tokens that are not known, in a drafter of one forward (P-EAGLE)."""

    token_id: int
    features: torch.Tensor
    """What ``fc`` reads in the place of residuals, ``[1, width]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleLayout(DecoderLayout):
    """An EAGLE checkpoint."""

    target_hidden_size: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None: its rows see all that is before them."""
    fc_norms: tuple[torch.Tensor, ...]
    """Norms before ``fc``: of all residuals joined, or one for each; none."""
    norm: torch.Tensor | None
    """Norm before the head; None: EAGLE-1."""
    is_residual_normed: bool
    """The residual around EAGLE-3's first layer is after ``hidden_norm``."""
    is_output_normed: bool
    """What a draft token hands to the next is after ``norm``."""
    masks: MaskInput | None = None
    """None: a draft token goes on with the output of the one before."""

    @property
    def joins_embedding_in_fc(self) -> bool:
        """EAGLE-1 and 2: ``fc`` makes a layer's input of embedding and feature."""
        return self.norm is None

    @property
    def feature_size(self) -> int:
        return self.target_hidden_size if self.joins_embedding_in_fc else self.hidden_size

    @property
    def one_pass_kind(self) -> str | None:
        return None if self.masks is None else "a P-EAGLE drafter"

    @property
    def mask_group_size(self) -> int:
        return self.attention.num_attention_heads // self.attention.num_key_value_heads


def is_eagle(files: DrafterFiles) -> bool:
    return any(_canonical(name) == "layers.0.self_attn.q_proj.weight" for name in files.tensors)


def _canonical(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def read_eagle(files: DrafterFiles, target: TargetShape) -> EagleLayout:
    """Reads an EAGLE checkpoint of any of its layouts.

    Raises:
        ConfigError: names the tensor or field that does not fit the layout or the target, and what would.
    """
    for name in files.tensors:
        if _UNREAD.search(name):
            raise files.refuse(
                f"{name} belongs to a drafter of whole blocks; allowed: those of EAGLE-1, 2, 3, P-EAGLE"
            )
    files.rename(_canonical)
    hidden_size, _ = files.shape("layers.0.self_attn.o_proj.weight")
    width = files.shape("layers.0.self_attn.q_proj.weight")[1]
    if width not in (hidden_size, 2 * hidden_size):
        raise files.refuse(
            f"layers.0.self_attn.q_proj.weight reads {width} numbers; allowed: {2 * hidden_size} (EAGLE-3) "
            f"or {hidden_size} (EAGLE-1)"
        )
    reader = _EagleReader(files, target, hidden_size, is_first=width == hidden_size)
    layout = reader.read()
    name = "EAGLE-3" if layout.masks is None else "P-EAGLE"
    files.check_all_taken("EAGLE-1" if layout.joins_embedding_in_fc else name)
    return layout


class _EagleReader:
    """Takes the tensors of one checkpoint."""

    def __init__(self, files: DrafterFiles, target: TargetShape, hidden_size: int, *, is_first: bool) -> None:
        self._files = files
        self._target = target
        self._hidden = hidden_size
        self._is_first = is_first
        """EAGLE-1 or 2."""
        self._section = files.section("transformer_layer_config") or files.config
        self._eagle = files.section("eagle_config")

    def read(self) -> EagleLayout:
        files, hidden = self._files, self._hidden
        if self._flag("use_aux_hidden_state", default=True) is False and not self._is_first:
            raise files.refuse("eagle_config.use_aux_hidden_state is false; allowed: true")
        is_first = self._is_first
        attention = read_attention(files, self._section)
        layers = tuple(
            read_layer(
                files,
                index,
                hidden,
                attention,
                is_wide=index == 0 and not is_first,
                needs_norm=index > 0 or not is_first,
            )
            for index in range(count_layers(files))
        )
        fc, norms, read = self._fc()
        token_ids, head, _ = read_head(files, hidden, self._target)
        return EagleLayout(
            path=files.path,
            feature_layers=read,
            hidden_size=hidden,
            target_hidden_size=self._target.hidden_size,
            attention=attention,
            fc=fc,
            layers=layers,
            windows=read_windows(files, self._section, len(layers)),
            fc_norms=norms,
            norm=None if is_first else files.take("norm.weight", hidden),
            embedding=read_embedding(files, hidden, self._target),
            head=head,
            token_ids=token_ids,
            is_residual_normed=not is_first and self._is_residual_normed(),
            is_output_normed=self._flag("norm_output", default=False),
            logit_scale=files.scale("logit_scale", self._logit_scale()),
            masks=None if is_first else self._masks(fc[0].shape[1], has_norms=bool(norms)),
        )

    def _masks(self, width: int, *, has_norms: bool) -> MaskInput | None:
        files, name = self._files, "mask_hidden"
        if not files.has(name):
            if files.config.get("speculators_model_type") == "peagle":
                raise files.refuse(f"{name} is missing; allowed: [1, 1, {width}]")
            return None
        if has_norms:
            raise files.refuse(f"{name} stands beside norms before fc; allowed: one of both")
        sections = (files.section("dflash_config"), files.config, self._section)
        token_id = read_mask_id(files, sections, self._target.vocab_size)
        stored = files.tensors[name]
        shape = tuple(stored.shape) if stored.numel() == width else (1, 1, width)
        return MaskInput(token_id, files.take(name, *shape).reshape(1, width))

    def _flag(self, name: str, *, default: bool) -> bool:
        value = self._files.config.get(name, self._eagle.get(name, default))
        if type(value) is not bool:
            raise self._files.refuse(f"{name} is {value!r}; allowed: true or false")
        return value

    def _logit_scale(self) -> Any:
        name = "logit_scale"
        given = self._files.config.get(name)
        return self._eagle.get(name) if given is None else given

    def _is_residual_normed(self) -> bool:
        name, files = "norm_before_residual", self._files
        if name not in files.config and name not in self._eagle and "speculators_version" in files.config:
            _log.warning("drafter %s: %s is not set; false is taken", files.path, name)
        return self._flag(name, default=False)

    def _fc(
        self,
    ) -> tuple[WeightAndBias, tuple[torch.Tensor, ...], tuple[int, ...]]:
        files, size = self._files, self._target.hidden_size
        if self._is_first:
            # It reads what the target's head reads.
            return (
                read_linear(files, "fc", self._hidden, self._hidden + size),
                (),
                (self._target.num_layers + 1,),
            )
        width = files.shape("fc.weight")[1]
        num_read = files.num_features(width, size, files.config.get("target_hidden_size"))
        whole = files.take_if_there("input_norm.weight", width)
        single = [files.take_if_there(f"fc_norm.{index}.weight", size) for index in range(num_read)]
        norms = tuple(norm for norm in single if norm is not None)
        if norms and (whole is not None or len(norms) < num_read):
            raise files.refuse(
                f"fc_norm has {len(norms)} norms; allowed: {num_read} without input_norm, or 0"
            )
        if self._flag("norm_before_fc", default=whole is not None) != (whole is not None) and not norms:
            raise files.refuse("norm_before_fc and input_norm.weight do not agree; allowed: both or neither")
        norms = norms if whole is None else (whole,)
        return (
            read_linear(files, "fc", self._hidden, width),
            norms,
            read_layers(files, self._target.num_layers, num_read),
        )
