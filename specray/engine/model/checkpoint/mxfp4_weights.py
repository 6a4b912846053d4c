"""Weights of gpt-oss's own checkpoints, whose experts are in MXFP4: dequantised as they are taken.

MXFP4 (Open Compute Project: *Microscaling formats*, 2023): numbers of 4 bits, 32 of which share a power of
two. A tensor of all experts is stored as its transpose, ``[experts, out_features, in_features]``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.checkpoint.stored_format import BLOCKS_SUFFIX, SCALES_SUFFIX
from specray.errors import ConfigError

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a number of 4 bits mean; the fourth is the sign."""
_BLOCK = 32
"""Numbers that share a scale."""
_SCALE_BIAS = 127
"""What a scale's exponent is stored with."""


class Mxfp4Weights(NamedWeights):
    """Implements ``source.WeightSource`` over such files: as if they held plain weights.

    Args:
        path, directory, dtype, device, entry: as of ``SafetensorsWeights``.

    Raises:
        ConfigError: a file is missing or damaged, or blocks and scales do not fit each other.
    """

    def __init__(
        self,
        path: str,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        entry: str | None = None,
    ) -> None:
        self._path, self._dtype, self._device = path, dtype, device
        self._files = SafetensorsWeights(path, directory, dtype=dtype, device=device, entry=entry)
        found = self._files.shapes
        self._quantised = frozenset(
            name.removesuffix(BLOCKS_SUFFIX) for name in found if name.endswith(BLOCKS_SUFFIX)
        )
        parts = {f"{name}{suffix}" for name in self._quantised for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)}
        shapes = {name: shape for name, shape in found.items() if name not in parts}
        super().__init__(path, shapes | {name: self._shape(name) for name in self._quantised})

    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
        stored = self._names[name]
        if stored not in self._quantised:
            return self._files.read(stored, part)
        some_experts = part if part is not None and part.dim == 0 else None
        blocks, scales = (
            self._files.raw(f"{stored}{suffix}", some_experts).to(self._device)
            for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)
        )
        weight = dequantised(blocks, scales).to(self._dtype).transpose(1, 2)
        if part is not None and part.dim > 0:
            weight = weight.narrow(part.dim, part.start, part.stop - part.start)
        return weight.contiguous()

    def _shape(self, name: str) -> tuple[int, ...]:
        blocks = self._files.shapes[f"{name}{BLOCKS_SUFFIX}"]
        scales = self._files.shapes.get(f"{name}{SCALES_SUFFIX}")
        if scales is None:
            raise ConfigError(f"model {self._path!r} lacks weights: {name}{SCALES_SUFFIX}")
        if len(blocks) != 4 or blocks[3] != _BLOCK // 2 or blocks[:3] != scales:
            raise ConfigError(
                f"model {self._path!r} cannot be loaded: weight {name!r} has blocks of shape {list(blocks)} "
                f"and scales of shape {list(scales)}; allowed: [experts, rows, groups, {_BLOCK // 2}] and "
                "[experts, rows, groups]"
            )
        return blocks[0], blocks[2] * _BLOCK, blocks[1]


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of MXFP4, float32 ``[..., groups * 32]``.

    Args:
        blocks: uint8 ``[..., groups, 16]``: two numbers in a byte, the first in its lower bits.
        scales: uint8 ``[..., groups]``: exponents of two.
    """
    signed = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    of_byte = torch.stack((signed[byte & 15], signed[byte >> 4]), -1)
    numbers = of_byte[blocks.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - _SCALE_BIAS).flatten(-2)
