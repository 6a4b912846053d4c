"""Fields of config.json, each of the kind that a reader asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specray.engine.model.decoder_config import FactorScaling, LinearScaling, Llama3Scaling, RopeFormula


class NotUnderstoodError(Exception):
    """A value means something that only the library knows, or nothing at all."""


def is_whole(value: object) -> bool:
    return type(value) is int


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_token_id(value: object) -> bool:
    return value is None or is_whole(value) or (isinstance(value, list) and all(map(is_whole, value)))


def _is_dtype(value: object) -> bool:
    return value is None or value in ("bfloat16", "float16", "float32")


def _are_labels(value: object) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and isinstance(label, str) for key, label in value.items()
    )


_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "model_type": lambda value: True,
    "architectures": lambda value: (
        value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    ),
    "attention_dropout": is_number,
    "bos_token_id": lambda value: value is None or is_whole(value),
    "chunk_size_feed_forward": lambda value: value == 0 and is_whole(value),
    "dtype": _is_dtype,
    "eos_token_id": _is_token_id,
    "id2label": _are_labels,
    "initializer_range": lambda value: type(value) is float and 0.0 <= value <= 1.0,
    "is_encoder_decoder": lambda value: value is False,
    "label2id": lambda value: isinstance(value, dict) and all(map(is_whole, value.values())),
    "output_attentions": lambda value: value is False,
    "output_hidden_states": lambda value: value is False,
    "pad_token_id": lambda value: value is None or is_whole(value),
    # Says which token stands for one to be predicted, wherever it lies.
    "pard_token": lambda value: True,
    "pretraining_tp": lambda value: value is None or is_whole(value),
    "problem_type": lambda value: value is None,
    "quantization_config": lambda value: value is None,
    "return_dict": lambda value: value is True,
    "torch_dtype": _is_dtype,
    "transformers_version": lambda value: isinstance(value, str),
    "use_cache": lambda value: isinstance(value, bool),
    "use_mrope": lambda value: value is False,
    "_name_or_path": lambda value: isinstance(value, str),
}
"""Keys that change nothing of what is computed, and the values with which the library takes them."""


class ConfigFields:
    """The values of one type, by name, each of the kind that is asked for."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in defaults:
                continue
            if name not in _WITHOUT_EFFECT or not _WITHOUT_EFFECT[name](value):
                raise NotUnderstoodError(name)
        self.values = {**defaults, **values}

    def size(self, name: str) -> int:
        """A whole number above zero."""
        value = self.values[name]
        if type(value) is not int or value < 1:
            raise NotUnderstoodError(name)
        return value

    def size_or_none(self, name: str) -> int | None:
        return None if self.values[name] is None else self.size(name)

    def window(self, name: str) -> int | None:
        """Tokens that a layer attends to; of one alone the library's cache keeps another."""
        size = self.size_or_none(name)
        if size == 1:
            raise NotUnderstoodError(name)
        return size

    def flag(self, name: str) -> bool:
        """True or False; False for a type that has no such field."""
        value = self.values.get(name, False)
        if type(value) is not bool:
            raise NotUnderstoodError(name)
        return value

    def value(self, name: str) -> Any:
        return self.values.get(name)


def rope_formula(given: Mapping[str, Any], max_position_embeddings: int) -> RopeFormula:
    """Rotary embeddings of one kind, ``rope_theta`` among their values."""
    values = dict(given)
    older_name = values.pop("type", "default")
    kind = values.pop("rope_type", older_name)
    theta = _number(values, "rope_theta")
    scaling: LinearScaling | Llama3Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(_number(values, "factor"))
    elif kind == "llama3":
        original = values.pop("original_max_position_embeddings", max_position_embeddings)
        if type(original) is not int or original < 1:
            raise NotUnderstoodError("original_max_position_embeddings")
        scaling = Llama3Scaling(
            _number(values, "factor"),
            _number(values, "low_freq_factor"),
            _number(values, "high_freq_factor"),
            original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise NotUnderstoodError("high_freq_factor")
    elif kind != "default":
        raise NotUnderstoodError("rope_type")
    if values:
        raise NotUnderstoodError(", ".join(values))
    return RopeFormula(theta, scaling)


def factor_formula(given: Mapping[str, Any], head_dim: int) -> RopeFormula:
    """``longrope`` with the same factors for texts of any length, and none of cosines and sines.

    Raises:
        NotUnderstoodError: they are not, or not one positive number for each frequency.
    """
    values = dict(given)
    short, long = values.pop("short_factor", None), values.pop("long_factor", None)
    theta, scale = _number(values, "rope_theta"), _number(values, "attention_factor")
    if short != long or scale != 1.0 or not isinstance(short, list) or len(short) != head_dim // 2:
        raise NotUnderstoodError("short_factor, long_factor, attention_factor")
    if not all(is_number(factor) and factor > 0 for factor in short):
        raise NotUnderstoodError("short_factor")
    if set(values) - {"rope_type", "original_max_position_embeddings"}:
        raise NotUnderstoodError(", ".join(values))
    return RopeFormula(theta, FactorScaling(tuple(map(float, short))))


def _number(values: dict[str, Any], name: str) -> float:
    value = values.pop(name, None)
    if not is_number(value) or not value > 0:
        raise NotUnderstoodError(name)
    return float(value)
