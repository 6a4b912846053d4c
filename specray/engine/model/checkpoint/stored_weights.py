"""Weights of a quantised checkpoint, dequantised one by one as they are taken."""

from __future__ import annotations

from pathlib import Path

import torch

from specray.engine.model.checkpoint import dequantise
from specray.engine.model.checkpoint.layer_formats import StoredFormat
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.checkpoint.stored_format import (
    NEEDED,
    PARTS,
    UNUSED,
    ZERO_POINT,
    is_mark,
    layer_format,
)
from specray.engine.model.checks.messages import one_line
from specray.errors import ConfigError


class StoredWeights(NamedWeights):
    """Implements ``source.WeightSource`` over quantised files: as if they held plain weights.

    Args:
        path, directory, dtype, device, entry: as of ``SafetensorsWeights``.
        stored: how layers are quantised; those without such tensors are plain.

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
    ) -> None:
        self._path, self._stored, self._dtype, self._device = path, stored, dtype, device
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

    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
        stored = self._names[name]
        layer = self._layers.get(stored)
        if layer is None:
            return self._files.read(stored, part)
        try:
            weight = self._dequantised(layer)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ConfigError(
                f"model {self._path!r} cannot be loaded: weight {stored!r}: {one_line(error)}"
            ) from None
        if tuple(weight.shape) != self.shapes[name]:
            raise ConfigError(
                f"model {self._path!r} cannot be loaded: weight {stored!r} is {list(weight.shape)}; "
                f"allowed: {list(self.shapes[name])}"
            )
        if part is not None:
            weight = weight.narrow(part.dim, part.start, part.stop - part.start)
        return weight.to(device=self._device, dtype=self._dtype).contiguous()

    def _quantised_layers(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self._files.shapes if is_mark(name)})

    def _kind(self, layer: str) -> str:
        has = self._files.shapes
        if f"{layer}.qweight" in has:
            kind = "awq" if self._stored.method == "awq" else "gptq"
        else:
            kind = "packed" if f"{layer}.weight_packed" in has else "scaled"
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
        if kind == "packed":
            return tuple(int(size) for size in self._files.raw(f"{layer}.weight_shape").tolist())
        rows, columns = shapes[f"{layer}.qweight"]
        per_word = 32 // self._formats[layer].bits
        return (columns, rows * per_word) if kind == "gptq" else (columns * per_word, rows)

    def _dequantised(self, layer: str) -> torch.Tensor:
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
