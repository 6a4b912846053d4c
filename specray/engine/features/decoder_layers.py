"""Llama-like layers of drafters: what their tensors must be, and what is made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.features.base import Placed
from specray.engine.features.files import DrafterFiles
from specray.engine.model.decoder import Norm
from specray.engine.model.decoder_config import DecoderConfig
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.model.linear import Gate, Linear

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_act")
_ONLY: dict[str, tuple[Any, ...]] = {"is_neox_style": (True,), "partial_rotary_factor": (1,)}
"""Fields that change which numbers are rotated, and the values that are read."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WITHOUT_WINDOW = ("llama", "qwen2", "qwen3", None)
"""Model types that have no window unless a field besides ``sliding_window`` says so."""

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias of a linear layer; None: it has no bias."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder layer's tensors; biases and head norms may be absent."""

    input_norm: torch.Tensor | None
    """Norm of the layer's input; of the embedding, in EAGLE-3's first layer."""
    hidden_norm: torch.Tensor | None
    """Norm of the features, of EAGLE-3's first layer alone."""
    qkv: WeightAndBias
    """Weight and bias of queries, keys and values, one after the other."""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: WeightAndBias
    post_norm: torch.Tensor
    gate: WeightAndBias
    up: WeightAndBias
    down: WeightAndBias

    @property
    def num_weights(self) -> int:
        linears = (self.qkv, self.output, self.gate, self.up, self.down)
        return sum(tensor.numel() for both in linears for tensor in both if tensor is not None)

    @property
    def num_columns(self) -> int:
        return sum(len(weight) for weight, _ in (self.qkv, self.output, self.gate, self.up, self.down))


def count_layers(files: DrafterFiles) -> int:
    found = {re.match(r"layers\.(\d+)\.", name) for name in files.tensors}
    return 1 + max(int(match[1]) for match in found if match is not None)


def read_attention(files: DrafterFiles, section: dict[str, Any]) -> DecoderConfig:
    """Heads, rotary positions and epsilon of all layers, as the first one's tensors have them.

    Args:
        section: of the configuration, with what a Llama's says.

    Raises:
        ConfigError: names the field or tensor that does not fit, and what would.
    """
    for name, allowed in _ONLY.items():
        for value in (section.get(name), files.config.get(name)):
            if value is not None and value not in allowed:
                raise files.refuse(f"{name} is {value!r}; allowed: {allowed[0]!r}")
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
        given = {name: section.get(name) for name in (*_ROPE_FIELDS[:3], "rms_norm_eps") if name in section}
        raise files.refuse(f"{given} are not understood; allowed: rope types default, linear and llama3")
    return config


def read_windows(files: DrafterFiles, section: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer (a row sees ``window - 1`` positions before it); None: all. Raises ConfigError."""
    are_sliding = sliding_layers(files, section, num_layers)
    window = section.get("sliding_window")
    return tuple(window_size(files, window) if is_sliding else None for is_sliding in are_sliding)


def sliding_layers(files: DrafterFiles, section: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a window. Raises ConfigError where fields do not say it, or contradict it."""
    kinds, is_used = section.get("layer_types"), section.get("use_sliding_window")
    if is_used is not None and type(is_used) is not bool:
        raise files.refuse(f"use_sliding_window is {is_used!r}; allowed: true or false")
    if kinds is None:
        first = _first_sliding(files, section, num_layers)
        return tuple(index >= first for index in range(num_layers))
    is_known = isinstance(kinds, list) and all(kind in (_SLIDING, _FULL) for kind in kinds)
    if not is_known or len(kinds) != num_layers:
        raise files.refuse(f"layer_types is {kinds!r}; allowed: {num_layers} of {_FULL!r} and {_SLIDING!r}")
    if _SLIDING in kinds and is_used is False:
        raise files.refuse(f"use_sliding_window is False and layer_types {kinds!r}; allowed: {_FULL!r} alone")
    return tuple(kind == _SLIDING for kind in kinds)


def _first_sliding(files: DrafterFiles, section: dict[str, Any], num_layers: int) -> int:
    """The first layer with a window where no field names each layer's kind."""
    window, is_used = section.get("sliding_window"), section.get("use_sliding_window")
    if window is None or is_used is False:
        return num_layers
    if is_used:
        first = section.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise files.refuse(
                f"max_window_layers is {first!r}, and use_sliding_window true; allowed: a whole number from "
                "0 on, or layer_types"
            )
        return first
    model_type = section.get("model_type")
    if model_type == "mistral":
        return 0
    if model_type not in _WITHOUT_WINDOW:
        raise files.refuse(
            f"layer_types is not set, and model_type {model_type!r} has a sliding_window of {window!r}; "
            f"allowed: {num_layers} of {_FULL!r} and {_SLIDING!r}"
        )
    return num_layers


def window_size(files: DrafterFiles, window: Any) -> int:
    """A window of the configuration. Raises ConfigError for what is none."""
    if type(window) is not int or window < 1:
        raise files.refuse(f"sliding_window is {window!r}; allowed: a whole number above 0")
    return window


def read_layer(
    files: DrafterFiles,
    index: int,
    hidden: int,
    attention: DecoderConfig,
    *,
    is_wide: bool = False,
    needs_norm: bool = True,
) -> LayerTensors:
    """Takes the tensors of one layer.

    Args:
        is_wide: it reads embedding and features, each after a norm of its own (EAGLE-3's first layer).
        needs_norm: a missing norm of its input is an error.

    Raises:
        ConfigError: names the tensor that does not fit, and what would.
    """
    prefix = f"layers.{index}."
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
    name = f"{prefix}input_layernorm.weight"
    return LayerTensors(
        input_norm=files.take(name, hidden) if needs_norm else files.take_if_there(name, hidden),
        hidden_norm=files.take(f"{prefix}hidden_norm.weight", hidden) if is_wide else None,
        qkv=(torch.cat(weights), torch.cat(given) if given else None),
        head_norms=None if norm is None else (norm, files.take(f"{prefix}self_attn.k_norm.weight", size)),
        output=read_linear(files, f"{prefix}self_attn.o_proj", hidden, query),
        post_norm=files.take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate=read_linear(files, f"{prefix}mlp.gate_proj", inner, hidden),
        up=read_linear(files, f"{prefix}mlp.up_proj", inner, hidden),
        down=read_linear(files, f"{prefix}mlp.down_proj", hidden, inner),
    )


def read_linear(files: DrafterFiles, name: str, rows: int, columns: int) -> WeightAndBias:
    return files.take(f"{name}.weight", rows, columns), files.take_if_there(f"{name}.bias", rows)


@dataclass(frozen=True, slots=True)
class LoweredLayer:
    """One layer, on the target's device and in its data type."""

    input_norm: Norm | None
    hidden_norm: Norm | None
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    post_norm: Norm
    gate: Gate
    down: Linear


class Lowering:
    """Makes a drafter's parts out of its tensors.

    Args:
        parts: where they go; those of the target, where the drafter is next to it.
        attention: of the drafter's layers.
    """

    def __init__(self, parts: Placed, attention: DecoderConfig) -> None:
        self._parts = parts
        self._attention = attention

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._parts.device, dtype=self._parts.dtype).contiguous()

    def norm(self, weight: torch.Tensor) -> Norm:
        return self._parts.operators.norm(self.cast(weight), self._attention.rms_norm_eps)

    def linear(self, tensors: WeightAndBias) -> Linear:
        weight, bias = tensors
        return self._parts.operators.linear(self.cast(weight), None if bias is None else self.cast(bias))

    def gate(self, gate: WeightAndBias, up: WeightAndBias) -> Gate:
        first, second = (None if bias is None else self.cast(bias) for _, bias in (gate, up))
        return self._parts.operators.gate(self.cast(gate[0]), self.cast(up[0]), first, second)

    def head_norm(self, weight: torch.Tensor, num_heads: int) -> torch.Tensor:
        return self.cast(weight).expand(num_heads, -1)

    def layer(self, layer: LayerTensors) -> LoweredLayer:
        heads, attention = None, self._attention
        if layer.head_norms is not None:
            query, key = layer.head_norms
            weights = (
                self.head_norm(query, attention.num_attention_heads),
                self.head_norm(key, attention.num_key_value_heads),
            )
            heads = HeadNorm(torch.cat(weights), attention.rms_norm_eps)
        return LoweredLayer(
            input_norm=None if layer.input_norm is None else self.norm(layer.input_norm),
            hidden_norm=None if layer.hidden_norm is None else self.norm(layer.hidden_norm),
            qkv=self.linear(layer.qkv),
            head_norm=heads,
            output=self.linear(layer.output),
            post_norm=self.norm(layer.post_norm),
            gate=self.gate(layer.gate, layer.up),
            down=self.linear(layer.down),
        )
