"""Weights of gpt-oss's own checkpoints, whose experts are in MXFP4: in their own bits, or dequantised.

MXFP4 (Open Compute Project: *Microscaling formats*, 2023): numbers of 4 bits, 32 of which share a power of
two. A tensor of all experts is stored as its transpose, ``[experts, out_features, in_features]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.checkpoint.stored_format import BLOCKS_SUFFIX, MXFP4, SCALES_SUFFIX
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.stored_weight import StoredWeight
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
        has_own_bits: :meth:`stored` gives weights.

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
        has_own_bits: bool = False,
    ) -> None:
        self._path, self._dtype, self._device, self._has_own_bits = path, dtype, device, has_own_bits
        self._files = SafetensorsWeights(path, directory, dtype=dtype, device=device, entry=entry)
        found = self._files.shapes
        self._quantised = frozenset(
            name.removesuffix(BLOCKS_SUFFIX) for name in found if name.endswith(BLOCKS_SUFFIX)
        )
        parts = {f"{name}{suffix}" for name in self._quantised for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)}
        shapes = {name: shape for name, shape in found.items() if name not in parts}
        super().__init__(path, shapes | {name: self._shape(name) for name in self._quantised})

    def keep_wide(self, names: frozenset[str]) -> None:
        super().keep_wide(names)
        self._files.keep_wide(frozenset(self._names[name] for name in self._wide))

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

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        """One expert's weight in GGUF's blocks of the same values; None: it is plain, or own bits are off."""
        stored = self._names[name]
        if stored not in self._quantised or not self._has_own_bits:
            return None
        assert part is not None and part.dim == 0 and part.stop == part.start + 1, "one expert"
        blocks, scales = (
            self._files.raw(f"{stored}{suffix}", part)[0] for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)
        )
        weight = BlockWeight(BlockType.MXFP4, block_rows(blocks, scales))
        if not weight.is_finite():
            raise ConfigError(f"model {self._path!r}: the weight {name!r} holds NaN or infinite values")
        return StoredWeight((weight,))

    @property
    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of each weight that :meth:`stored` gives, all experts together."""
        if not self._has_own_bits:
            return {}
        found = ((name, stored) for name, stored in self._names.items() if stored in self._quantised)
        return {
            name: math.prod(self._shape(stored)) // _BLOCK * BlockType.MXFP4.size.num_bytes
            for name, stored in found
        }

    @property
    def stored_formats(self) -> Mapping[str, str]:
        return dict.fromkeys(self.stored_bytes, MXFP4)

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


def block_rows(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of GGUF's blocks of MXFP4, which have the same values; uint8 ``[rows, groups * 17]``.

    A byte of these has the numbers 16 apart; and their values are twice as large, with scales half as large,
    of the same exponents' bytes.

    Args:
        blocks: uint8 ``[rows, groups, 16]``: two numbers in a byte, the first in its lower bits.
        scales: uint8 ``[rows, groups]``.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    packed = codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4
    return torch.cat((scales[..., None], packed), -1).flatten(1)
