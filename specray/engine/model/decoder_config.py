"""What decides what the decoder computes: a model's configuration, read from config.json without the library.

Read are the types that the decoder covers, with each type's own defaults, as transformers reads them. A file
with anything else in it is not guessed at: the library reads it then (see ``library``), which takes seconds
longer, as it imports all the models' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_ROPE_THETA = 10_000.0
"""Base of the rotary wavelengths where a configuration names none."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by ``factor``, high ones as they are, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Tokens of the context before it was extended."""


@dataclass(frozen=True, slots=True)
class RopeFormula:
    """Rotary frequencies by their formula."""

    theta: float
    """Base of the wavelengths."""
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary frequencies as the library computed them, for the formulas that only it has."""

    inverse_frequencies: tuple[float, ...]
    """Radians per token, ``head_dim / 2`` of them; each is a float32."""
    attention_factor: float
    """Factor of cosines and sines."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A model that the decoder covers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tie_word_embeddings: bool
    """The head's weight is the embedding's."""
    has_qkv_bias: bool
    has_output_bias: bool
    """The attention's output projection has a bias."""
    has_mlp_bias: bool
    has_head_norm: bool
    """Queries and keys are normed head by head."""
    windows: tuple[int | None, ...]
    """Tokens that each layer attends to; None: all."""
    rope: RopeFormula | RopeTable
    draft_vocab_size: int | None = None
    """Rows of a head that knows some token ids alone; None: it knows all."""

    @property
    def num_logits(self) -> int:
        """Rows of the head."""
        return self.draft_vocab_size or self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model by its name in a checkpoint; a tied head has none."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            for name, shape in self._layer_shapes().items():
                shapes[f"{layer_prefix(layer)}{name}"] = shape
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.num_logits, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (query, hidden, self.has_qkv_bias),
            "self_attn.k_proj": (key, hidden, self.has_qkv_bias),
            "self_attn.v_proj": (key, hidden, self.has_qkv_bias),
            "self_attn.o_proj": (hidden, query, self.has_output_bias),
            "mlp.gate_proj": (inner, hidden, self.has_mlp_bias),
            "mlp.up_proj": (inner, hidden, self.has_mlp_bias),
            "mlp.down_proj": (hidden, inner, self.has_mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.has_head_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
        return shapes


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def layer_prefix(layer: int) -> str:
    """What the names of a layer's weights begin with."""
    return f"model.layers.{layer}."


def read_decoder_config(values: Mapping[str, Any]) -> DecoderConfig | None:
    """The configuration that config.json holds; None: not every part of it is understood.

    Args:
        values: config.json as it is.
    """
    try:
        return _read(values)
    except _NotUnderstoodError:
        return None


class _NotUnderstoodError(Exception):
    """A value means something that only the library knows, or nothing at all."""


# Defaults of the types' own classes.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2_048,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "head_dim": None,
    "sliding_window": 4_096,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "head_dim": None,
    "use_sliding_window": False,
    "sliding_window": 4_096,
    "max_window_layers": 28,
    "layer_types": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
}
_SHARED: dict[str, Any] = {
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "draft_vocab_size": None,
    "rope_theta": DEFAULT_ROPE_THETA,
    "rope_scaling": None,
    "rope_parameters": None,
}


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_token_id(value: object) -> bool:
    return value is None or _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))


def _is_dtype(value: object) -> bool:
    return value is None or value in ("bfloat16", "float16", "float32")


_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "model_type": lambda value: True,
    "architectures": lambda value: (
        value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    ),
    "attention_dropout": _is_number,
    "bos_token_id": lambda value: value is None or _is_whole(value),
    "dtype": _is_dtype,
    "eos_token_id": _is_token_id,
    "initializer_range": lambda value: type(value) is float and 0.0 <= value <= 1.0,
    "pad_token_id": lambda value: value is None or _is_whole(value),
    # Says which token stands for one to be predicted, wherever it lies.
    "pard_token": lambda value: True,
    "pretraining_tp": lambda value: value is None or _is_whole(value),
    "quantization_config": lambda value: value is None,
    "torch_dtype": _is_dtype,
    "transformers_version": lambda value: isinstance(value, str),
    "use_cache": lambda value: isinstance(value, bool),
    "use_mrope": lambda value: value is False,
    "_name_or_path": lambda value: isinstance(value, str),
}
"""Keys that change nothing of what is computed, and the values with which the library takes them."""


class _Fields:
    """The values of one type, by name, each of the kind that is asked for."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in defaults:
                continue
            if name not in _WITHOUT_EFFECT or not _WITHOUT_EFFECT[name](value):
                raise _NotUnderstoodError(name)
        self._values = {**defaults, **values}

    def size(self, name: str) -> int:
        """A whole number above zero."""
        value = self._values[name]
        if type(value) is not int or value < 1:
            raise _NotUnderstoodError(name)
        return value

    def size_or_none(self, name: str) -> int | None:
        return None if self._values[name] is None else self.size(name)

    def flag(self, name: str) -> bool:
        """True or False; False for a type that has no such field."""
        value = self._values.get(name, False)
        if type(value) is not bool:
            raise _NotUnderstoodError(name)
        return value

    def value(self, name: str) -> Any:
        return self._values.get(name)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise _NotUnderstoodError("model_type")
    fields = _Fields(values, {**_SHARED, **_OWN[model_type]})
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.value("hidden_act") != "silu" or (model_type == "llama" and hidden_size % num_heads):
        raise _NotUnderstoodError("hidden_act, hidden_size")
    is_given = model_type in ("mistral", "qwen3")
    num_kv_heads = (
        fields.size("num_key_value_heads") if is_given else fields.size_or_none("num_key_value_heads")
    )
    is_given = model_type == "qwen3" or (model_type == "qwen2" and "head_dim" in values)
    head_dim = fields.size("head_dim") if is_given else fields.size_or_none("head_dim")
    head_dim = head_dim or hidden_size // num_heads
    num_kv_heads = num_kv_heads or num_heads
    eps = fields.value("rms_norm_eps")
    if head_dim < 2 or head_dim % 2 or num_heads % num_kv_heads or type(eps) is not float:
        raise _NotUnderstoodError("head_dim, num_key_value_heads, rms_norm_eps")
    max_position_embeddings = fields.size("max_position_embeddings")
    has_bias = fields.flag("attention_bias")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=model_type == "qwen2" or has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias"),
        has_head_norm=model_type == "qwen3",
        windows=_windows(model_type, fields),
        rope=_rope(fields, max_position_embeddings),
        draft_vocab_size=fields.size_or_none("draft_vocab_size"),
    )


def _windows(model_type: str, fields: _Fields) -> tuple[int | None, ...]:
    num_layers = fields.size("num_hidden_layers")
    if model_type == "llama":
        return (None,) * num_layers
    window = fields.size_or_none("sliding_window")
    if model_type == "mistral":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    first = fields.value("max_window_layers")
    if type(first) is not int:
        raise _NotUnderstoodError("max_window_layers")
    kinds = fields.value("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _NotUnderstoodError("layer_types")
    if not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise _NotUnderstoodError("layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeFormula:
    """``rope_scaling`` of older files counts before ``rope_parameters``; both may name their own theta."""
    older, newer = fields.value("rope_scaling"), fields.value("rope_parameters")
    if not all(given is None or isinstance(given, Mapping) for given in (older, newer)):
        raise _NotUnderstoodError("rope_scaling, rope_parameters")
    given = older or newer or {}
    values = {"rope_theta": fields.value("rope_theta"), **given}
    older_name = values.pop("type", "default")
    kind = values.pop("rope_type", older_name)
    theta = _number(values, "rope_theta")
    scaling: LinearScaling | Llama3Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(_number(values, "factor"))
    elif kind == "llama3":
        original = values.pop("original_max_position_embeddings", max_position_embeddings)
        if type(original) is not int or original < 1:
            raise _NotUnderstoodError("original_max_position_embeddings")
        scaling = Llama3Scaling(
            _number(values, "factor"),
            _number(values, "low_freq_factor"),
            _number(values, "high_freq_factor"),
            original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise _NotUnderstoodError("high_freq_factor")
    elif kind != "default":
        raise _NotUnderstoodError("rope_type")
    if values:
        raise _NotUnderstoodError(", ".join(values))
    return RopeFormula(theta, scaling)


def _number(values: dict[str, Any], name: str) -> float:
    """Takes a number above zero out of the values."""
    value = values.pop(name, None)
    if not _is_number(value) or not value > 0:
        raise _NotUnderstoodError(name)
    return float(value)
