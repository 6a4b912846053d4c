"""Weights of a quantised checkpoint: in their own bits, or dequantised one by one as they are taken."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from specray.engine.model.checkpoint import dequantise
from specray.engine.model.checkpoint.dequantise import Unpacked
from specray.engine.model.checkpoint.layer_formats import WHOLE_ROWS, StoredFormat
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.checkpoint.stored_format import (
    DIVISOR,
    FACTOR,
    NEEDED,
    PARTS,
    UNUSED,
    ZERO_POINT,
    is_mark,
    layer_format,
)
from specray.engine.model.checks.messages import one_line
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.quantization import GROUP
from specray.engine.weights.reordered_weight import ReorderedWeight
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError

_log = logging.getLogger(__name__)
_HELD_TYPES = torch.int8, torch.float8_e4m3fn
"""Types of numbers of 8 bits that kernels hold."""


class StoredWeights(NamedWeights):
    """Implements ``source.WeightSource`` over quantised files.

    Args:
        path, directory, dtype, device, entry: as of ``SafetensorsWeights``.
        stored: how layers are quantised; those without such tensors are plain.
        has_own_bits: :meth:`stored` gives weights, of layers in formats that kernels hold exactly.
        holds_all: kernels also hold floating-point numbers, and columns whose groups are no runs.

    Raises:
        ConfigError: a file is missing or damaged, or a layer lacks a part of what its format needs.
    """

    def __init__(
        self,
        path: str,
        directory: Path,
        stored: StoredFormat,
        *,
        dtype: torch.dtype,
        device: torch.device,
        entry: str | None = None,
        has_own_bits: bool = False,
        holds_all: bool = False,
    ) -> None:
        self._path, self._stored, self._dtype, self._device = path, stored, dtype, device
        self._holds_all = holds_all
        self._has_own_bits, self._has_warned = has_own_bits, False
        self._files = SafetensorsWeights(path, directory, dtype=dtype, device=device, entry=entry)
        layers = self._quantised_layers()
        self._formats = {layer: layer_format(path, stored, layer) for layer in layers}
        self._layers = {f"{layer}.weight": layer for layer in layers}
        used = {f"{layer}.{suffix}" for layer in self._layers.values() for suffix in PARTS[self._kind(layer)]}
        shapes = {
            name: shape
            for name, shape in self._files.shapes.items()
            if name not in used and name.rpartition(".")[2] not in UNUSED
        }
        super().__init__(path, shapes | {name: self._shape(layer) for name, layer in self._layers.items()})

    def keep_wide(self, names: frozenset[str]) -> None:
        super().keep_wide(names)
        self._files.keep_wide(frozenset(self._names[name] for name in self._wide))

    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
        stored = self._names[name]
        layer = self._layers.get(stored)
        if layer is None:
            return self._files.read(stored, part)
        weight = self._unpacked(stored, layer).values()
        if part is not None:
            weight = weight.narrow(part.dim, part.start, part.stop - part.start)
        return weight.to(device=self._device, dtype=self._dtype).contiguous()

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        """A layer's codes and their groups' numbers; None: plain, or a form that no kernel holds."""
        stored = self._names[name]
        layer = self._layers.get(stored)
        if layer is None or not self._has_own_bits:
            return None
        weight = self._held(stored, layer) if layer in self._held_layers else None
        if part is not None and part.dim == 1 and weight is not None:
            unit = math.lcm(weight.unit, 1 if isinstance(weight, ReorderedWeight) else GROUP)
            weight = None if part.start % unit or part.stop % unit else weight
        if weight is None:
            self._warn(name)
            return None
        if not weight.is_finite():
            raise ConfigError(f"model {self._path!r}: the weight {name!r} holds NaN or infinite values")
        if part is not None and part.dim == 0:
            weight = weight.select(slice(part.start, part.stop))
        elif part is not None:
            weight = weight.columns(part.start, part.stop)
        return StoredWeight((weight,))

    def _held(self, stored: str, layer: str) -> GroupedWeight | Nvfp4Weight | ReorderedWeight:
        weight = self._unpacked(stored, layer)
        return weight if isinstance(weight, Nvfp4Weight) else weight.stored()

    def _warn(self, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        held = "integers and e4m3, in groups of multiples of 32 input features in order"
        if self._holds_all:
            held = "units of 32 input features"
        _log.warning(
            "%s: %s and maybe others are dequantised to dtype: kernels hold %s, and ranks of such",
            self._path,
            name,
            held,
        )

    @property
    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of each weight that :meth:`stored` gives, as the files have them."""
        if not self._has_own_bits:
            return {}
        layers = {name: self._layers.get(stored) for name, stored in self._names.items()}
        return {
            name: self._files_bytes(layer)
            for name, layer in layers.items()
            if layer is not None and layer in self._held_layers
        }

    @property
    def stored_formats(self) -> Mapping[str, str]:
        return dict.fromkeys(self.stored_bytes, self._stored.method)

    @functools.cached_property
    def _held_layers(self) -> frozenset[str]:
        return frozenset(layer for layer in self._layers.values() if self._is_held(layer))

    def _is_held(self, layer: str) -> bool:
        """Whether kernels hold its numbers: whole or e4m3, in groups of multiples of 32 input features in
        order; where they hold all, others, too."""
        kind, (_, columns) = self._kind(layer), self._shape(layer)
        if kind == "nvfp4":
            return self._holds_all and columns % GROUP == 0
        if kind == "scaled":
            is_held = self._files.raw(f"{layer}.weight").dtype in _HELD_TYPES
            block = self._formats[layer].block
            is_cut = block is not None and block[1] % GROUP == 0 and columns % GROUP == 0
            return is_held and (self._has_runs(layer) or (self._holds_all and is_cut))
        if self._has_runs(layer):
            return True
        return self._holds_all and kind in ("gptq", "packed") and self._order(layer) in self._files.shapes

    def _has_runs(self, layer: str) -> bool:
        """Whether groups are runs of one multiple of 32 input features, in order."""
        stored, kind, (_, columns) = self._formats[layer], self._kind(layer), self._shape(layer)
        has = self._files.shapes
        by_row = has.get(f"{layer}.weight_scale", has.get(f"{layer}.weight_scale_inv", ()))
        num_groups = has[f"{layer}.scales"][0] if kind in ("gptq", "awq") else (*by_row, 1, 1)[1]
        size = columns // max(1, num_groups)
        if stored.block is not None:
            size = stored.block[1]
        elif stored.group_size not in (None, WHOLE_ROWS) and num_groups > 1:
            size = stored.group_size or size
        if size % GROUP or size * num_groups != columns:
            return False
        order = self._order(layer)
        if order not in has:
            return True
        groups = self._files.raw(order).tolist()
        return -1 in groups or groups == [column // size for column in range(columns)]

    def _order(self, layer: str) -> str:
        """Name of the tensor with the group of each column."""
        return f"{layer}.{'g_idx' if self._kind(layer) == 'gptq' else 'weight_g_idx'}"

    def _files_bytes(self, layer: str) -> int:
        names = (f"{layer}.{suffix}" for suffix in PARTS[self._kind(layer)])
        return sum(self._files.num_bytes(name) for name in names if name in self._files.shapes)

    def _unpacked(self, stored: str, layer: str) -> Unpacked | Nvfp4Weight:
        """Raises ConfigError where its tensors do not fit each other."""
        try:
            weight = self._parts(layer)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ConfigError(
                f"model {self._path!r} cannot be loaded: weight {stored!r}: {one_line(error)}"
            ) from None
        expected = self._shape(layer)
        if weight.shape != expected:
            raise ConfigError(
                f"model {self._path!r} cannot be loaded: weight {stored!r} is {list(weight.shape)}; "
                f"allowed: {list(expected)}"
            )
        return weight

    def _quantised_layers(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self._files.shapes if is_mark(name)})

    def _kind(self, layer: str) -> str:
        has = self._files.shapes
        if f"{layer}.qweight" in has:
            kind = "awq" if self._stored.method == "awq" else "gptq"
        else:
            kind = "packed" if f"{layer}.weight_packed" in has else "scaled"
        if f"{layer}.{FACTOR}" in has or f"{layer}.{DIVISOR}" in has:
            kind = "nvfp4"
        for suffix in (*NEEDED[kind], *sorted(self._formats[layer].also_needed)):
            if f"{layer}.{suffix}" not in has:
                raise ConfigError(f"model {self._path!r} lacks weights: {layer}.{suffix}")
        if f"{layer}.{ZERO_POINT}" in has and not self._formats[layer].has_zero_points:
            raise ConfigError(
                f"model {self._path!r} has weights that its configuration says are not there: "
                f"{layer}.{ZERO_POINT}"
            )
        return kind

    def _shape(self, layer: str) -> tuple[int, ...]:
        shapes, kind = self._files.shapes, self._kind(layer)
        if kind == "scaled":
            return shapes[f"{layer}.weight"]
        if kind == "nvfp4":
            rows, pairs = shapes[self._pairs(layer)]
            return rows, 2 * pairs
        if kind == "packed":
            return tuple(int(size) for size in self._files.raw(f"{layer}.weight_shape").tolist())
        rows, columns = shapes[f"{layer}.qweight"]
        per_word = 32 // self._formats[layer].bits
        return (columns, rows * per_word) if kind == "gptq" else (columns * per_word, rows)

    def _pairs(self, layer: str) -> str:
        """Name of the tensor with the codes of NVFP4. Raises ConfigError: there is none."""
        for name in (f"{layer}.weight_packed", f"{layer}.weight"):
            if len(self._files.shapes.get(name, ())) == 2:
                return name
        raise ConfigError(f"model {self._path!r} lacks weights: {layer}.weight_packed")

    def _parts(self, layer: str) -> Unpacked | Nvfp4Weight:
        stored, kind = self._formats[layer], self._kind(layer)

        def raw(suffix: str) -> torch.Tensor:
            return self._files.raw(f"{layer}.{suffix}")

        def optional(suffix: str) -> torch.Tensor | None:
            return raw(suffix) if f"{layer}.{suffix}" in self._files.shapes else None

        if kind == "scaled":
            scale = optional("weight_scale")
            scale = raw("weight_scale_inv") if scale is None else scale
            zero_point = optional(ZERO_POINT)
            return dequantise.scaled(
                raw("weight"), scale, zero_point, stored.block, group_size=stored.group_size
            )
        if kind == "nvfp4":
            pairs = self._files.raw(self._pairs(layer))
            return dequantise.nvfp4(pairs, raw("weight_scale"), optional(FACTOR), optional(DIVISOR))
        if kind == "packed":
            rows, columns = self._shape(layer)
            zero_point, groups = optional(ZERO_POINT), optional("weight_g_idx")
            return dequantise.packed_rows(
                raw("weight_packed"),
                (rows, columns),
                raw("weight_scale"),
                zero_point,
                groups,
                bits=stored.bits,
                group_size=stored.group_size,
            )
        if kind == "awq":
            return dequantise.awq(raw("qweight"), raw("scales"), raw("qzeros"), group_size=stored.group_size)
        return dequantise.gptq(
            raw("qweight"),
            raw("scales"),
            raw("qzeros"),
            optional("g_idx"),
            bits=stored.bits,
            zero_offset=stored.zero_offset,
            group_size=stored.group_size,
        )
