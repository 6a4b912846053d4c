"""Accounts for the keys of a GGUF header: each is read, changes nothing, or refuses the file by its name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from specray.gguf.header import GgufHeader, LongArray, Single, Value, read_floats

# Values at which a key changes nothing, for keys of which no family reads others.
_NEUTRAL: Mapping[str, tuple[Single, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}
_WITHOUT_MEANING = frozenset({"rope.scaling.finetuned"})
"""Notes on how a model came about, by which no family is computed in another way."""


class UnfitError(Exception):
    """Why a file cannot be converted, in words that follow "cannot be converted: "."""


class Keys:
    """The keys of a header's architecture, without its name before them, and small tensors next to them.

    Each reader raises UnfitError for a value of another type or out of its range.
    """

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.header = header
        self._path = path
        self.apart: set[str] = set()
        """Names of the tensors that are no weights of the model: read here, or left aside."""
        self._prefix = f"{header.architecture}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in header.values.items()
            if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; a list of equal ones by layer counts as one."""

        def is_fit(value: Value) -> bool:
            return type(value) is int and value >= least

        value = self._take(
            name, default, is_fit, f"a whole number of at least {least}, the same in all layers"
        )
        assert isinstance(value, int)
        return value

    def whole_by_layer(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A whole number of each layer."""
        value = self._values.get(name)
        if not isinstance(value, tuple):
            return (self.whole(name, least=0),) * num_layers
        self._read.add(name)
        numbers = tuple(each for each in value if type(each) is int and each >= 0)
        if len(value) != num_layers or len(numbers) != num_layers:
            raise self.unfit(name, value, f"{num_layers} whole numbers of at least 0")
        return numbers

    def flags_by_layer(self, name: str, num_layers: int) -> tuple[bool, ...] | None:
        """A flag of each layer; None: the key is no list, or not there."""
        value = self._values.get(name)
        if not isinstance(value, tuple):
            return None
        self._read.add(name)
        if len(value) != num_layers or not all(each in (0, 1) for each in value):
            raise self.unfit(name, value, f"{num_layers} flags")
        return tuple(map(bool, value))

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number."""

        def is_fit(value: Value) -> bool:
            return type(value) in (int, float) and math.isfinite(value) and value > above  # type: ignore[arg-type, operator]

        allowed = "a number" if above == -math.inf else f"a number above {above:g}"
        value = self._take(name, default, is_fit, allowed)
        assert isinstance(value, (int, float))
        return shortest(float(value))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._take(name, default, lambda value: type(value) is bool, "true or false"))

    def text(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        return str(self._take(name, default, lambda value: value in allowed, ", ".join(allowed)))

    def expect(self, name: str, *allowed: Single) -> None:
        """Raises UnfitError for a key that is there and has none of the values."""
        if name in self._values:
            words = " or ".join(map(_shown, allowed))
            self._take(name, None, lambda value: _is_one_of(value, allowed), words)

    def has_tensor(self, name: str) -> bool:
        return self.header.tensor(name) is not None

    def floats(self, name: str, count: int) -> tuple[float, ...] | None:
        """The numbers of a small tensor; None: there is none."""
        values = read_floats(self._path, self.header, name)
        if values is not None and (len(values) != count or not all(map(math.isfinite, values))):
            raise UnfitError(f"the tensor {name!r} has {len(values)} numbers; allowed: {count} finite ones")
        self.apart.add(name)
        return values if values is None else tuple(map(shortest, values))

    def unfit(self, name: str, value: Value | None, allowed: str) -> UnfitError:
        problem = "is missing" if value is None else f"is {_shown(value)}"
        return UnfitError(f"{self._prefix}{name} {problem}; allowed: {allowed}")

    def check_all_read(self) -> None:
        """Raises UnfitError for keys that change something, and rotary factors, which no reader has taken."""
        for name, value in sorted(self._values.items()):
            allowed = _NEUTRAL.get(name, ())
            if name in self._read | _WITHOUT_MEANING or _is_one_of(value, allowed):
                continue
            words = " or ".join(map(_shown, allowed)) or "a file without this key"
            raise UnfitError(f"{self._prefix}{name} is {_shown(value)}, which is not read; allowed: {words}")
        for tensor in self.header.tensors:
            if tensor.name.startswith("rope_") and tensor.name not in self.apart:
                raise UnfitError(f"the tensor {tensor.name!r} is not read for this architecture")

    def _take(
        self, name: str, default: Single | None, is_fit: Callable[[Value], bool], allowed: str
    ) -> Single:
        self._read.add(name)
        value = self._values.get(name, default)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, (tuple, LongArray)) or not is_fit(value):
            raise self.unfit(name, value, allowed)
        return value


def shortest(value: float) -> float:
    """The number with the fewest digits that has the same float32: 1e-5 for what a file holds of it."""
    stored = struct.pack("<f", value)
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in rounded if struct.pack("<f", each) == stored), value)


def _is_one_of(value: Value, allowed: tuple[Single, ...]) -> bool:
    """Whether a value is one of those; a number of either type may be the same, a flag is no number."""
    for each in allowed:
        if isinstance(value, bool) != isinstance(each, bool) or isinstance(value, (tuple, LongArray)):
            continue
        if isinstance(value, (int, float)) and isinstance(each, (int, float)):
            if math.isclose(value, each, rel_tol=1e-6):
                return True
        elif value == each:
            return True
    return False


def _shown(value: Value) -> str:
    if isinstance(value, LongArray):
        return f"an array of {value.count}"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
