"""Reads EAGLE checkpoints, whoever wrote them: what a drafter computes follows from its tensors and flags.

EAGLE-3 heads are found as ``midlayer.*`` (the authors', SGLang, SpecForge, NVIDIA) and as ``layers.0.*``
(vLLM, speculators); with a vocabulary of their own or the target's; with or without embedding and head.
EAGLE-1 and 2 have one layer behind ``fc``, no norm before it, and the target's head. P-EAGLE is EAGLE-3 with
``mask_hidden``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.features.base import TargetShape
from specray.engine.features.files import DrafterFiles
from specray.engine.features.layers import read_layers
from specray.engine.model.decoder_config import DecoderConfig
from specray.engine.model.families.config_json import read_decoder_config

_log = logging.getLogger(__name__)

_UNREAD = re.compile(r"(^|\.)(mask_embedding|markov\w*|confidence\w*|conv\w*)")
"""Tensors of drafters that draft a block at once."""
_MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the configuration that name the mask token, the surest first."""
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_act")


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder layer's tensors; biases and head norms may be absent."""

    input_norm: torch.Tensor | None
    """Norm of the layer's input; of the embedding, in EAGLE-3's first layer."""
    hidden_norm: torch.Tensor | None
    """Norm of the features, of EAGLE-3's first layer alone."""
    qkv: tuple[torch.Tensor, torch.Tensor | None]
    """Weight and bias of queries, keys and values, one after the other."""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: tuple[torch.Tensor, torch.Tensor | None]
    post_norm: torch.Tensor
    gate: tuple[torch.Tensor, torch.Tensor | None]
    up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Masks:
    """What stands in the place of draft tokens that are not known, in a drafter of one forward (P-EAGLE)."""

    token_id: int
    features: torch.Tensor
    """What ``fc`` reads in the place of residuals, ``[1, width]``."""


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """An EAGLE checkpoint that fits the target, with everything that its forward depends on."""

    path: str
    feature_layers: tuple[int, ...]
    hidden_size: int
    target_hidden_size: int
    attention: DecoderConfig
    """Heads, rotary positions and epsilon of its layers."""
    fc: tuple[torch.Tensor, torch.Tensor | None]
    layers: tuple[LayerTensors, ...]
    fc_norms: tuple[torch.Tensor, ...]
    """Norms before ``fc``: of all residuals joined, or one for each; none."""
    norm: torch.Tensor | None
    """Norm before the head; None: EAGLE-1."""
    embedding: torch.Tensor | None
    """None: the target's."""
    head: torch.Tensor | None
    """Rows in the order of ``token_ids``; None: the target's."""
    token_ids: NDArray[np.int64] | None
    """Token ids of the logits, ascending; None: all of the target's."""
    is_residual_normed: bool
    """The residual around EAGLE-3's first layer is behind ``hidden_norm``."""
    is_output_normed: bool
    """What a draft token hands to the next is behind ``norm``."""
    logit_scale: float
    masks: Masks | None = None
    """None: a draft token goes on with the output of the one before."""

    @property
    def joins_embedding_in_fc(self) -> bool:
        """EAGLE-1 and 2: ``fc`` makes a layer's input of embedding and feature."""
        return self.norm is None

    def bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of features and K/V that one token takes."""
        keys_values = 2 * self.attention.num_key_value_heads * self.attention.head_dim
        size = self.target_hidden_size if self.joins_embedding_in_fc else self.hidden_size
        return item_bytes * (size + len(self.layers) * keys_values)

    @property
    def num_weights(self) -> int:
        """Numbers of the tensors that are held."""
        layers = (tensor for layer in self.layers for tensor in _tensors_of(layer))
        own = (self.embedding, self.head, *self.fc)
        return sum(tensor.numel() for tensor in (*layers, *own) if tensor is not None)


def _tensors_of(layer: LayerTensors) -> list[torch.Tensor | None]:
    return [*layer.qkv, *layer.output, *layer.gate, *layer.up, *layer.down]


def is_eagle(files: DrafterFiles) -> bool:
    """Whether the tensors are those of an EAGLE drafter, under whichever name."""
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
                f"{name} belongs to a drafter of whole blocks; allowed: EAGLE-1, 2, 3, P-EAGLE, Medusa"
            )
    files.rename(_canonical)
    hidden_size, _ = files.shape("layers.0.self_attn.o_proj.weight")
    width = files.shape("layers.0.self_attn.q_proj.weight")[1]
    if width not in (hidden_size, 2 * hidden_size):
        raise files.refuse(
            f"layers.0.self_attn.q_proj.weight reads {width} numbers; allowed: {2 * hidden_size} (EAGLE-3) "
            f"or {hidden_size} (EAGLE-1)"
        )
    reader = _Reader(files, target, hidden_size, is_first=width == hidden_size)
    layout = reader.read()
    name = "EAGLE-3" if layout.masks is None else "P-EAGLE"
    files.check_all_taken("EAGLE-1" if layout.joins_embedding_in_fc else name)
    return layout


class _Reader:
    """Takes the tensors of one checkpoint."""

    def __init__(self, files: DrafterFiles, target: TargetShape, hidden_size: int, *, is_first: bool) -> None:
        self._files = files
        self._target = target
        self._hidden = hidden_size
        self._is_first = is_first
        """EAGLE-1 or 2."""
        nested = files.config.get("transformer_layer_config")
        self._section: dict[str, Any] = nested if isinstance(nested, dict) else files.config
        self._eagle: dict[str, Any] = files.config.get("eagle_config") or {}

    def read(self) -> EagleLayout:
        files, hidden = self._files, self._hidden
        if self._flag("use_aux_hidden_state", default=True) is False and not self._is_first:
            raise files.refuse("eagle_config.use_aux_hidden_state is false; allowed: true")
        attention = self._attention()
        layers = tuple(self._layer(index, attention) for index in range(self._num_layers()))
        fc, norms, read = self._fc()
        token_ids, head = self._head()
        is_first = self._is_first
        scale = files.config.get("logit_scale")
        return EagleLayout(
            path=files.path,
            feature_layers=read,
            hidden_size=hidden,
            target_hidden_size=self._target.hidden_size,
            attention=attention,
            fc=fc,
            layers=layers,
            fc_norms=norms,
            norm=None if is_first else files.take("norm.weight", hidden),
            embedding=self._embedding(),
            head=head,
            token_ids=token_ids,
            is_residual_normed=not is_first and self._is_residual_normed(),
            is_output_normed=self._flag("norm_output", default=False),
            logit_scale=1.0 if scale is None else float(scale),
            masks=None if is_first else self._masks(fc[0].shape[1], has_norms=bool(norms)),
        )

    def _masks(self, width: int, *, has_norms: bool) -> Masks | None:
        """The masks of a P-EAGLE drafter; None: it is none."""
        files, name = self._files, "mask_hidden"
        if not files.has(name):
            if files.config.get("speculators_model_type") == "peagle":
                raise files.refuse(f"{name} is missing; allowed: [1, 1, {width}]")
            return None
        if has_norms:
            raise files.refuse(f"{name} stands beside norms before fc; allowed: one of both")
        block = files.config.get("dflash_config")
        sections = (block if isinstance(block, dict) else {}, files.config, self._section)
        found = [section[key] for key in _MASK_IDS for section in sections if section.get(key) is not None]
        token_id, vocab_size = found[0] if found else None, self._target.vocab_size
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise files.refuse(
                f"{_MASK_IDS[0]} is {token_id!r}; allowed: a token id, 0..{vocab_size - 1} (also as "
                f"{', '.join(_MASK_IDS[1:])})"
            )
        return Masks(token_id, files.take(name, 1, 1, width).reshape(1, width))

    def _flag(self, name: str, *, default: bool) -> bool:
        value = self._files.config.get(name, self._eagle.get(name, default))
        if type(value) is not bool:
            raise self._files.refuse(f"{name} is {value!r}; allowed: true or false")
        return value

    def _is_residual_normed(self) -> bool:
        name, files = "norm_before_residual", self._files
        if name not in files.config and name not in self._eagle and "speculators_version" in files.config:
            _log.warning("drafter %s: %s is not set; false is taken", files.path, name)
        return self._flag(name, default=False)

    def _num_layers(self) -> int:
        found = {re.match(r"layers\.(\d+)\.", name) for name in self._files.tensors}
        return 1 + max(int(match[1]) for match in found if match is not None)

    def _attention(self) -> DecoderConfig:
        files, section = self._files, self._section
        if section.get("hidden_act", "silu") != "silu":
            raise files.refuse(f"hidden_act is {section['hidden_act']!r}; allowed: 'silu'")
        num_heads = files.whole("num_attention_heads", None, section=section)
        rows = files.shape("layers.0.self_attn.q_proj.weight")[0]
        key_rows = files.shape("layers.0.self_attn.k_proj.weight")[0]
        head_dim = rows // num_heads
        if rows % num_heads or head_dim % 2 or key_rows % head_dim or num_heads % (key_rows // head_dim):
            raise files.refuse(
                f"num_attention_heads is {num_heads}, with {rows} query and {key_rows} key rows; allowed: "
                "heads of one even size, and a multiple of the key heads"
            )
        values = {name: section[name] for name in _ROPE_FIELDS if section.get(name) is not None}
        eps = section.get("rms_norm_eps", 1e-6)
        values |= {
            "model_type": "llama",
            "hidden_size": rows,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": key_rows // head_dim,
            "head_dim": head_dim,
            "rms_norm_eps": float(eps) if isinstance(eps, int | float) else eps,
        }
        config = read_decoder_config(values)
        if config is None:
            given = {
                name: section.get(name) for name in (*_ROPE_FIELDS[:3], "rms_norm_eps") if name in section
            }
            raise files.refuse(f"{given} are not understood; allowed: rope types default, linear and llama3")
        return config

    def _layer(self, index: int, attention: DecoderConfig) -> LayerTensors:
        files, hidden, prefix = self._files, self._hidden, f"layers.{index}."
        is_wide = index == 0 and not self._is_first
        size, heads = attention.head_dim, attention.num_attention_heads
        query, key = heads * size, attention.num_key_value_heads * size
        width = 2 * hidden if is_wide else hidden
        inner = files.shape(f"{prefix}mlp.gate_proj.weight")[0]
        parts = [(name, rows) for name, rows in zip("qkv", (query, key, key), strict=True)]
        weights = [files.take(f"{prefix}self_attn.{name}_proj.weight", rows, width) for name, rows in parts]
        biases = [files.take_if_there(f"{prefix}self_attn.{name}_proj.bias", rows) for name, rows in parts]
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(biases):
            raise files.refuse(f"{prefix}self_attn has {len(given)} biases of q, k, v; allowed: none or 3")
        norm = files.take_if_there(f"{prefix}self_attn.q_norm.weight", size)
        needs_norm = is_wide or index > 0
        name = f"{prefix}input_layernorm.weight"
        return LayerTensors(
            input_norm=files.take(name, hidden) if needs_norm else files.take_if_there(name, hidden),
            hidden_norm=files.take(f"{prefix}hidden_norm.weight", hidden) if is_wide else None,
            qkv=(torch.cat(weights), torch.cat(given) if given else None),
            head_norms=None if norm is None else (norm, files.take(f"{prefix}self_attn.k_norm.weight", size)),
            output=self._linear(f"{prefix}self_attn.o_proj", hidden, query),
            post_norm=files.take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate=self._linear(f"{prefix}mlp.gate_proj", inner, hidden),
            up=self._linear(f"{prefix}mlp.up_proj", inner, hidden),
            down=self._linear(f"{prefix}mlp.down_proj", hidden, inner),
        )

    def _linear(self, name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        files = self._files
        return files.take(f"{name}.weight", rows, columns), files.take_if_there(f"{name}.bias", rows)

    def _fc(
        self,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, ...], tuple[int, ...]]:
        """``fc``, the norms before it, and the layers that it reads."""
        files, size = self._files, self._target.hidden_size
        if self._is_first:
            # It reads what the target's head reads.
            return self._linear("fc", self._hidden, self._hidden + size), (), (self._target.num_layers + 1,)
        width = files.shape("fc.weight")[1]
        given = files.config.get("target_hidden_size")
        if given is not None and given != size:
            raise files.refuse(f"target_hidden_size is {given}; allowed: {size}, the target's")
        if width % size:
            raise files.refuse(f"fc.weight reads {width} numbers; allowed: a multiple of the target's {size}")
        num_read = width // size
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
            self._linear("fc", self._hidden, width),
            norms,
            read_layers(files, self._target.num_layers, num_read),
        )

    def _embedding(self) -> torch.Tensor | None:
        files, target = self._files, self._target
        table = files.take_if_there("embed_tokens.weight", target.vocab_size, self._hidden)
        if table is None and self._hidden != target.hidden_size:
            raise files.refuse(
                f"embed_tokens.weight is missing; allowed: only where the drafter is as wide as the target, "
                f"{target.hidden_size}, and not {self._hidden}"
            )
        return table

    def _head(self) -> tuple[NDArray[np.int64] | None, torch.Tensor | None]:
        """Token ids of the logits, and the head's rows in their order."""
        files, vocab_size = self._files, self._target.vocab_size
        files.pass_over(["t2d"])
        num_rows = files.shape("lm_head.weight")[0] if files.has("lm_head.weight") else None
        given = files.config.get("draft_vocab_size")
        if num_rows is not None and given not in (None, num_rows):
            raise files.refuse(
                f"draft_vocab_size is {given}; allowed: {num_rows}, the rows of lm_head.weight"
            )
        head = None if num_rows is None else files.take("lm_head.weight", num_rows, self._hidden)
        if head is None and self._hidden != self._target.hidden_size:
            raise files.refuse(f"lm_head.weight is missing; allowed: [.., {self._hidden}]")
        offsets = files.tensors.get("d2t")
        if offsets is None and num_rows in (None, vocab_size):
            return None, head
        num_ids = num_rows or (0 if offsets is None else len(offsets))
        token_ids = np.arange(num_ids, dtype=np.int64)
        if offsets is not None:
            token_ids = token_ids + files.take("d2t", num_ids).to(torch.int64).numpy()
        known = {token_id for token_id in token_ids.tolist() if 0 <= token_id < vocab_size}
        if not num_ids or len(known) < num_ids:
            raise files.refuse(
                f"d2t gives token ids that are no {num_ids} different ones of 0..{vocab_size - 1}"
            )
        order = np.argsort(token_ids)
        if len(token_ids) == vocab_size:
            return None, None if head is None else head[torch.from_numpy(order)]
        return token_ids[order], None if head is None else head[torch.from_numpy(order)]
