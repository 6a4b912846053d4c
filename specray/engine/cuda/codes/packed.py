"""A weight in codes on its device, and how the parts of a stored weight get there.

Parts are taken apart some rows at a time on the device itself, so that what lies between takes some MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specray.engine.cuda.codes.layout import (
    BLOCK_LAYOUTS,
    INT4,
    INT8,
    NVFP4,
    CodeLayout,
    Codes,
    Minimums,
    Scales,
)
from specray.engine.weights.block_codes import decode, halves, iq4_xs_scales, six_bit_scales
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import BYTE_BITS, NIBBLE_BITS, GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.quantization import GROUP
from specray.engine.weights.quantized_weight import QuantizedWeight
from specray.engine.weights.reordered_weight import ReorderedWeight
from specray.engine.weights.stored_weight import Part, StoredWeight
from specray.errors import ConfigError

Packable = Part | QuantizedWeight
_VALUES_AT_ONCE = 1 << 24
"""Values that are taken apart at once."""
_MIDDLE = 8
"""Zero point of symmetric codes of 4 bits."""
_HALF = GROUP // 2


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[size, in_features]``, or one of each expert, in a layout.

    Experts, where there are some, are the first dimension of every tensor.
    """

    layout: CodeLayout
    codes: torch.Tensor  # uint8 [units, size, code_bytes]
    words: torch.Tensor | None  # int32 [units, num_words, size]
    factors: torch.Tensor | None  # uint8 [units, num_factors, size]
    numbers: torch.Tensor | None  # float16 or float32 [runs, num_numbers, size]
    zeros: torch.Tensor | None  # int8 [runs, size]
    outer: torch.Tensor | None  # float32 [size]
    order: torch.Tensor | None  # int32 [units * 32]: the input feature of each place, or -1
    in_features: int

    @property
    def size(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_units(self) -> int:
        return self.codes.shape[-3]

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0] if self.codes.ndim == 4 else 1

    @property
    def num_weights(self) -> int:
        return self.num_experts * self.size * self.in_features

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors() if each is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def is_like(self, other: object) -> bool:
        """Whether both can be one weight of experts: numbers and zero points can be made alike."""
        if not isinstance(other, PackedWeight) or self.in_features != other.in_features:
            return False
        layouts = [replace(each.layout, number_bytes=4) for each in (self, other)]
        if self.layout.has_zeros != other.layout.has_zeros:
            layouts = [replace(each, offset=0, has_zeros=True) for each in layouts]
        is_ordered = self.order is not None, other.order is not None
        return (
            layouts[0] == layouts[1] and self.codes.shape == other.codes.shape and len(set(is_ordered)) == 1
        )

    def select(self, rows: slice) -> PackedWeight:
        """Some output features."""

        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[..., rows]

        return replace(
            self,
            codes=self.codes[:, rows],
            words=of(self.words),
            factors=of(self.factors),
            numbers=of(self.numbers),
            zeros=of(self.zeros),
            outer=of(self.outer),
        )

    def copy(self) -> PackedWeight:
        """The weight in other memory."""
        copies = [None if each is None else each.clone() for each in self._tensors()]
        codes, *others = copies
        assert codes is not None, "codes are always there"
        words, factors, numbers, zeros, outer, order = others
        return PackedWeight(
            self.layout, codes, words, factors, numbers, zeros, outer, order, self.in_features
        )

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.codes, self.words, self.factors, self.numbers, self.zeros, self.outer, self.order


def can_pack(weight: StoredWeight) -> bool:
    return all(
        not isinstance(part, GroupedWeight) or (part.group % GROUP == 0 and part.bits <= BYTE_BITS)
        for part in weight.parts
    )


def pack(part: Packable, device: torch.device) -> PackedWeight:
    """Packs a part. Raises ConfigError: a number of it is NaN or infinite."""
    if isinstance(part, ReorderedWeight):
        packed = _pack(part.sorted, device)
        return replace(packed, order=part.order.to(device), in_features=part.in_features)
    return _pack(part, device)


def stack_packed(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight of those of experts that are alike."""
    weights = _alike(weights)
    first = weights[0]

    def together(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        found = [each for each in tensors if each is not None]
        return torch.stack(found) if found else None

    return PackedWeight(
        first.layout,
        torch.stack([each.codes for each in weights]),
        together(each.words for each in weights),
        together(each.factors for each in weights),
        together(each.numbers for each in weights),
        together(each.zeros for each in weights),
        together(each.outer for each in weights),
        together(each.order for each in weights),
        first.in_features,
    )


def _alike(weights: Sequence[PackedWeight]) -> Sequence[PackedWeight]:
    """Weights with equal values; float32 numbers and zero points are in all weights where they are in one."""
    number_bytes = max(each.layout.number_bytes for each in weights)
    has_zeros = any(each.layout.has_zeros for each in weights)
    made = []
    for weight in weights:
        layout, numbers, zeros = weight.layout, weight.numbers, weight.zeros
        if numbers is not None and number_bytes > layout.number_bytes:
            numbers = numbers.float()
        if has_zeros and zeros is None:
            shape = weight.num_units // layout.run, weight.size
            zeros = torch.full(shape, layout.offset, dtype=torch.int8, device=weight.codes.device)
            layout = replace(layout, offset=0, has_zeros=True)
        made.append(
            replace(weight, layout=replace(layout, number_bytes=number_bytes), numbers=numbers, zeros=zeros)
        )
    return made


@dataclass(frozen=True, slots=True)
class _Units:
    """Some rows, taken apart."""

    codes: torch.Tensor  # uint8 [rows, units, 32]: not packed; or as they are held
    factors: torch.Tensor | None = None  # [rows, units, num_factors]
    numbers: torch.Tensor | None = None  # [rows, runs, num_numbers]


def _pack(part: Packable, device: torch.device) -> PackedWeight:
    if isinstance(part, QuantizedWeight):
        out_features, in_features = part.codes.shape
    else:
        out_features, in_features = part.shape
    layout, zeros, outer, take = _plan(part)
    units = in_features // GROUP
    runs = units // layout.run

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if 0 not in shape else None

    codes = torch.empty(units, out_features, layout.code_bytes, dtype=torch.uint8, device=device)
    words = empty(torch.int32, units, layout.num_words, out_features)
    factors = empty(torch.uint8, units, layout.num_factors, out_features)
    number_type = torch.float16 if layout.number_bytes == 2 else torch.float32
    numbers = empty(number_type, runs, layout.num_numbers, out_features)
    for rows in _row_runs(out_features, in_features):
        with device:
            found = take(rows, device)
            _place(found, rows, layout, codes, words)
        if factors is not None and found.factors is not None:
            factors[:, :, rows] = found.factors.permute(1, 2, 0).contiguous().view(torch.uint8)
        if numbers is not None and found.numbers is not None:
            numbers[:, :, rows] = found.numbers.permute(1, 2, 0).to(number_type)
    if numbers is not None and not bool(numbers.isfinite().all()):
        raise ConfigError("a weight holds a scale that is NaN or infinite; allowed: finite numbers")
    held = None if zeros is None else zeros.to(device).T.contiguous()
    factor = None if outer is None else outer.float().to(device).contiguous()
    return PackedWeight(layout, codes, words, factors, numbers, held, factor, None, in_features)


def _row_runs(out_features: int, in_features: int) -> Iterator[slice]:
    step = max(1, _VALUES_AT_ONCE // max(1, in_features))
    for first in range(0, out_features, step):
        yield slice(first, min(first + step, out_features))


def _place(
    found: _Units, rows: slice, layout: CodeLayout, codes: torch.Tensor, words: torch.Tensor | None
) -> None:
    raw = found.codes
    if raw.shape[2] == layout.code_bytes:
        codes[:, rows] = raw.transpose(0, 1)
        return
    low, high = raw[..., :_HALF] & 15, raw[..., _HALF:] << 4
    codes[:, rows] = (low | high).transpose(0, 1)
    if words is None:
        return
    upper, width = (raw >> 4).int(), layout.num_words
    per_word = GROUP // width
    shifts = torch.arange(0, GROUP, width, dtype=torch.int32)
    # The sum of bits that do not meet; of 32 the last one is the sign.
    made = (upper.view(*upper.shape[:2], width, per_word).long() << shifts.long()).sum(-1)
    words[:, :, rows] = _as_int32(made).permute(1, 2, 0)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


_Take = Callable[[slice, torch.device], _Units]
_Plan = tuple[CodeLayout, torch.Tensor | None, torch.Tensor | None, _Take]


def _plan(part: Packable) -> _Plan:
    """The layout of a part, its zeros and factors, and what takes some rows of it apart."""
    if isinstance(part, BlockWeight):
        return BLOCK_LAYOUTS[part.kind], None, None, lambda rows, device: _blocks(part, rows, device)
    if isinstance(part, QuantizedWeight):
        layout = INT8 if part.minimums is None else INT4
        return layout, None, None, lambda rows, device: _quantized(part, rows, device)
    if isinstance(part, Nvfp4Weight):
        return _nvfp4_plan(part)
    assert isinstance(part, GroupedWeight), "taken apart by its caller"
    return _grouped_plan(part)


def _blocks(part: BlockWeight, rows: slice, device: torch.device) -> _Units:
    kind = part.kind
    raw = part.rows[rows].to(device)
    blocks = raw.view(len(raw), -1, kind.size.num_bytes)
    layout, start = BLOCK_LAYOUTS[kind], _CODES_AT.get(kind)
    if start is not None:
        codes = blocks[..., start:].reshape(len(raw), -1, layout.code_bytes)
    else:
        found = decode(kind, raw).codes.view(len(raw), -1, GROUP)
        codes = (found + layout.offset).view(torch.uint8)
    if layout.scales is Scales.E8M0:
        return _Units(codes, blocks[..., :1])
    numbers = torch.cat([halves(blocks, place) for place in _NUMBERS_AT[kind]], -1)
    if layout.minimums is Minimums.UINT8:
        factors = torch.stack(six_bit_scales(blocks[..., 4:16]), -1).view(len(raw), -1, 2)
    elif kind is BlockType.Q6_K:
        factors = blocks[..., 192:208].reshape(len(raw), -1, 2)
    elif kind is BlockType.IQ4_XS:
        factors = iq4_xs_scales(blocks).to(torch.int8).view(torch.uint8).view(len(raw), -1, 1)
    else:
        return _Units(codes, None, numbers)
    return _Units(codes, factors, numbers)


_CODES_AT: dict[BlockType, int] = {
    BlockType.Q4_0: 2,
    BlockType.Q4_1: 4,
    BlockType.Q8_0: 2,
    BlockType.IQ4_NL: 2,
    BlockType.IQ4_XS: 8,
    BlockType.MXFP4: 1,
}
"""Bytes before the codes of types whose blocks hold them as a unit does."""
_NUMBERS_AT: dict[BlockType, tuple[int, ...]] = {
    kind: (208,) if kind is BlockType.Q6_K else (0, 2)[: layout.num_numbers]
    for kind, layout in BLOCK_LAYOUTS.items()
}
"""Bytes before each number of a block."""


def _quantized(part: QuantizedWeight, rows: slice, device: torch.device) -> _Units:
    codes = part.codes[rows].to(device).view(torch.uint8).view(rows.stop - rows.start, -1, GROUP)
    numbers = [part.scales] + ([] if part.minimums is None else [part.minimums])
    return _Units(codes, None, torch.stack([each[rows].to(device) for each in numbers], -1))


def _nvfp4_plan(part: Nvfp4Weight) -> _Plan:
    def take(rows: slice, device: torch.device) -> _Units:
        codes, scales = part.codes[rows].to(device), part.scales[rows].view(torch.uint8).to(device)
        unpacked = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, GROUP)
        return _Units(unpacked, scales.view(len(codes), -1, 2))

    return NVFP4, None, part.factors, take


def _grouped_plan(part: GroupedWeight) -> _Plan:
    zeros, offset = part.zeros, 0
    if part.bits == NIBBLE_BITS and zeros is not None and bool((zeros == _MIDDLE).all()):
        zeros, offset = None, _MIDDLE
    scales, is_whole = part.scales.float(), part.scales.shape[1] == 1
    is_float16 = torch.equal(scales.half().float(), scales)
    layout = CodeLayout(
        part.bits,
        Codes.E4M3 if part.codes.dtype == torch.float8_e4m3fn else Codes.INTEGERS,
        offset=offset,
        scales=Scales.NONE if is_whole else Scales.NUMBER,
        run=part.group // GROUP,
        has_zeros=zeros is not None,
        has_outer=is_whole,
        number_bytes=2 if is_float16 else 4,
    )

    def take(rows: slice, device: torch.device) -> _Units:
        codes = part.codes[rows].view(torch.uint8).to(device).view(rows.stop - rows.start, -1, GROUP)
        return _Units(codes, None, None if is_whole else scales[rows].to(device)[..., None])

    return layout, zeros, scales[:, 0] if is_whole else None, take
