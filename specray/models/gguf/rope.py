"""Reads the rotary embeddings of a GGUF file: base, share of the head, and every kind of scaling."""

from __future__ import annotations

import math
from typing import Any

from specray.models.gguf.keys import Keys, UnfitError

_BASE = 10_000.0
"""Base of a file that names none, as llama.cpp takes it."""
_KINDS = ("none", "linear", "yarn", "longrope")
_SHORT, _LONG, _FREQUENCIES = (f"rope_{name}.weight" for name in ("factors_short", "factors_long", "freqs"))
_LOW, _HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Factors of low and high frequencies, and the context before it was extended, of all Llama 3 models that
were published; a file holds what follows of these alone."""


def read_rope(
    keys: Keys, head_dim: int, context: int, *, can_be_partial: bool = False, has_factors: bool = False
) -> dict[str, Any]:
    """``rope_parameters`` of config.json.

    Args:
        context: tokens of the longest sequence, which is also that before scaling where none is named.
        can_be_partial: the family may rotate a part of each head.
        has_factors: llama.cpp knows tensors of rotary factors in the family.

    Raises:
        UnfitError: a value is wrong, or means what transformers cannot say.
    """
    theta = keys.number("rope.freq_base", _BASE, above=0)
    rotated = keys.whole("rope.dimension_count", head_dim)
    if rotated != head_dim and (not can_be_partial or rotated > head_dim or rotated % 2):
        allowed = f"an even number up to {head_dim}" if can_be_partial else f"{head_dim}, the size of a head"
        raise keys.unfit("rope.dimension_count", rotated, allowed)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    original = keys.whole("rope.scaling.original_context_length", context)
    rope |= _scaling(keys, original)
    if has_factors:
        rope |= _factors(keys, theta, rotated, original)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return rope


def _scaling(keys: Keys, original: int) -> dict[str, Any]:
    # llama.cpp takes a factor without a kind for a linear one.
    kind = keys.text("rope.scaling.type", "linear", _KINDS)
    old = keys.number("rope.scale_linear", 0.0, above=-1e-9)
    factor = keys.number("rope.scaling.factor", old, above=-1e-9) or 1.0
    if kind == "longrope" and not keys.has_tensor(_SHORT):
        raise keys.unfit("rope.scaling.type", kind, f"with the tensor {_SHORT!r}")
    if kind == "none" or factor == 1.0:
        return {}
    if any(map(keys.has_tensor, (_SHORT, _LONG, _FREQUENCIES))):
        raise keys.unfit("rope.scaling.factor", factor, "1 beside a tensor of rotary factors")
    if kind == "yarn":
        return _yarn(keys, factor, original)
    return {"rope_type": "linear", "factor": factor}


def _yarn(keys: Keys, factor: float, original: int) -> dict[str, Any]:
    """YaRN. Its attention factor is ``0.1 * ln(factor) + 1`` times what the header says."""
    if factor < 1:
        raise keys.unfit("rope.scaling.factor", factor, "1 or more")
    usual = 0.1 * math.log(factor) + 1
    keys.expect("rope.scaling.yarn_ext_factor", -1.0, 1.0)
    # As an attention factor of transformers, or as one on top of the usual one: llama.cpp's own do not agree.
    keys.expect("rope.scaling.yarn_attn_factor", usual)
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
    }
    own = keys.number("rope.scaling.attn_factor", 1.0, above=0)
    return rope if own == 1.0 else rope | {"attention_factor": usual * own}


def _factors(keys: Keys, theta: float, rotated: int, original: int) -> dict[str, Any]:
    """Scaling by a factor for each frequency, which a tensor holds; empty: there is none."""
    short, long = (keys.floats(name, rotated // 2) for name in (_SHORT, _LONG))
    frequencies = keys.floats(_FREQUENCIES, rotated // 2)
    if short is None and long is None:
        return {} if frequencies is None else _llama3(frequencies, theta, rotated, original)
    if short is None or long is None or frequencies is not None:
        raise UnfitError(f"it has one of the tensors {_SHORT!r} and {_LONG!r}; allowed: both or none")
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0, above=0)
    return _table(short, long, attention_factor, original)


def _llama3(factors: tuple[float, ...], theta: float, rotated: int, original: int) -> dict[str, Any]:
    """Llama 3's formula where it gives these factors, since it is computed faster; else the factors."""
    if set(factors) == {1.0}:
        return {}
    factor = max(factors)
    expected = (_llama3_factor(theta ** (2 * index / rotated), factor) for index in range(rotated // 2))
    if all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(factors, expected, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    return _table(factors, factors, 1.0, original)


def _llama3_factor(inverse: float, factor: float) -> float:
    """What a frequency is divided by; ``inverse``: tokens per radian of it."""
    rotations = _LLAMA3_CONTEXT / (2 * math.pi * inverse)
    if rotations > _HIGH:
        return 1.0
    if rotations < _LOW:
        return factor
    share = (rotations - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - share) / factor + share)


def _table(short: tuple[float, ...], long: tuple[float, ...], scale: float, original: int) -> dict[str, Any]:
    """Factors as transformers takes them: short ones up to the original context, long ones beyond it."""
    if any(factor <= 0 for factor in (*short, *long)):
        raise UnfitError("a tensor of rotary factors holds 0 or less; allowed: above 0")
    return {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "attention_factor": scale,
        "original_max_position_embeddings": original,
    }
