"""Look-ups of single rows: in panels, which a tied head may share, and in blocks as a file has them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from specray.engine.cpu.gemm.quantized.decoding import DECODE
from specray.engine.cpu.gemm.quantized.layout import BLOCK_LAYOUTS, Numbers, Table
from specray.engine.cpu.gemm.quantized.panels import Panels
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.quantization import GROUP
from specray.engine.weights.stored_weight import StoredWeight

_SOURCE, _ROW_BYTES, _NUM_BLOCKS, _NUM_ROWS, _IDS, _OUT, _IS_FLOAT, _SCRATCH = range(8)
_NUM_ARGS = 8
_FACTORS, _NUMBERS, _CODES, _VALUES = 0, 64, 128, 512
"""Bytes before each of what a part's scratch holds."""
_MIN_SHARED_VALUES = 16_384
"""Minimum number of values for which a second thread pays off."""


class QuantizedEmbedding:
    """Token ids to hidden states; implements ``decoder.Embedding``.

    Args:
        panels: of one weight that was quantised as it came, which a head may share.
        dtype: of the hidden states.
    """

    def __init__(self, panels: Panels, dtype: torch.dtype) -> None:
        self.panels, self._dtype = panels, dtype
        self._bits, self._offset = panels.layout.bits, panels.layout.offset
        num_panels, num_groups, _ = panels.data.shape
        words = panels.data[..., : panels.layout.code_bytes]
        self._words = words.view(torch.int32).view(num_panels, num_groups, self._bits, PANEL)
        self._numbers = panels.numbers()
        per_lane = panels.layout.per_lane
        self._shifts = torch.tensor(
            [self._bits * (index // 2) + 16 * (index % 2) for index in range(2 * per_lane)], dtype=torch.int32
        )

    @property
    def num_bytes(self) -> int:
        return self.panels.data.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        panel, lane = token_ids // PANEL, token_ids % PANEL
        words = self._words[panel, :, :, lane]
        codes = ((words[..., None] >> self._shifts) & ((1 << self._bits) - 1)) - self._offset
        values = codes.view(len(token_ids), -1, GROUP).float()
        numbers = self._numbers[panel, :, :, lane].float()
        values *= numbers[..., :1]
        if numbers.shape[-1] == 2:
            values += numbers[..., 1:]
        return values.view(len(token_ids), -1).to(self._dtype)

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self(token_ids))


class BlockEmbedding:
    """Token ids to hidden states, from the rows of a file; implements ``decoder.Embedding``.

    Args:
        weight: maybe a view of the mapped file, of which look-ups read the rows that they want.
        dtype: of the hidden states, bfloat16 or float32.
    """

    def __init__(self, weight: BlockWeight, thread_pool: ThreadPool, dtype: torch.dtype) -> None:
        self._weight, self._thread_pool, self._dtype = weight, thread_pool, dtype
        self._kernel = _look_up_kernel(weight.kind)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(token_ids), self._weight.shape[1], dtype=self._dtype)
        self.into(token_ids, out)
        return out

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Writes rows to ``out``, contiguous. Raises IndexError for a token that the table lacks."""
        rows, ids = self._weight.rows, token_ids.to(torch.int64).contiguous()
        num_ids, num_features = out.shape
        assert out.is_contiguous() and out.dtype == self._dtype and num_ids == len(ids), (
            "as the caller has it"
        )
        if num_ids == 0:
            return
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(rows):
            raise IndexError(f"token ids are {int(ids.min())}..{int(ids.max())}; allowed: 0..{len(rows) - 1}")
        is_shared = num_ids * num_features >= _MIN_SHARED_VALUES
        num_parts = min(num_ids, self._thread_pool.size) if is_shared else 1
        scratch = torch.empty(num_parts, APART, dtype=torch.uint8)
        num_blocks = num_features // self._weight.kind.size.num_values
        args = np.array(
            [
                *(rows.data_ptr(), rows.stride(0), num_blocks, num_ids, ids.data_ptr(), out.data_ptr()),
                *(self._dtype == torch.float32, scratch.data_ptr()),
            ],
            dtype=np.int64,
        )
        self._thread_pool.run(self._kernel, args.ctypes.data, num_parts)


class StoredEmbedding:
    """Token ids to hidden states, from any stored weight; implements ``decoder.Embedding``."""

    def __init__(self, weight: StoredWeight, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.select(token_ids).values(self._dtype)

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self(token_ids))


@functools.cache
def _look_up_kernel(kind: BlockType) -> Kernel:
    return Kernel(f"look-up-{kind.value}", _NUM_ARGS, functools.partial(_make_look_up, kind))


@intrinsic
def _from_half(context: Any, bits: Any) -> Any:
    """Converts the bits of a float16 to float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int32), code


def _make_values(kind: BlockType) -> Any:
    """Makes ``(codes, factors, numbers, values)``: numbers of a block, of what it was taken apart into."""
    layout = BLOCK_LAYOUTS[kind]
    num_groups, halves, num_factors = layout.num_groups, layout.halves, layout.num_factors
    each, offset, is_float32 = GROUP // layout.halves, layout.offset, layout.is_float32
    has_table, table = layout.table is not Table.THEMSELVES, np.array(layout.table.values, dtype=np.int8)
    has_scales, is_signed = layout.scales.is_factor, layout.scales is Numbers.INT8
    has_minimums, has_own = layout.minimums is not Numbers.NONE, layout.minimums.is_factor

    @kernel()
    def values(codes: Any, factors: Any, numbers: Any, values: Any) -> None:
        number = carray(as_pointer(numbers), (2,), np.float32)[0] if is_float32 else np.float32(0)
        words = carray(as_pointer(numbers), (2,), np.int32)
        if not is_float32:
            number = _from_half(words[0])
        for group in range(num_groups):
            minimum = _from_half(words[1]) if has_minimums else np.float32(0)
            if has_own:
                minimum *= np.float32(factors[group * num_factors + halves])
            for half in range(halves):
                scale, first = number, group * GROUP + half * each
                if has_scales:
                    factor = factors[group * num_factors + half]
                    scale *= np.float32(np.int8(factor)) if is_signed else np.float32(factor)
                for index in range(first, first + each):
                    code = np.int32(table[codes[index]]) if has_table else np.int32(codes[index]) - offset
                    value = np.float32(np.int32(code)) * scale
                    values[index] = value + minimum if has_minimums else value

    return values


def _make_look_up(kind: BlockType) -> Any:
    decode, source_bytes, num_values = DECODE[kind], kind.size.num_bytes, kind.size.num_values
    make_values = _make_values(kind)
    single, half = vectors(GROUP, "float32"), vectors(GROUP, "bfloat16")
    load, store, store_half = single.load, single.store, half.store

    def look_up(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks, is_float = args[_NUM_ROWS], args[_NUM_BLOCKS], args[_IS_FLOAT]
        ids = carray(as_pointer(args[_IDS]), (num_rows,), np.int64)
        scratch = args[_SCRATCH] + part * APART
        codes = carray(as_pointer(scratch + _CODES), (num_values,), np.uint8)
        factors = carray(as_pointer(scratch + _FACTORS), (64,), np.uint8)
        numbers = carray(as_pointer(scratch + _NUMBERS), (2,), np.int32)
        values = carray(as_pointer(scratch + _VALUES), (num_values,), np.float32)
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            source = args[_SOURCE] + ids[row] * args[_ROW_BYTES]
            for index in range(num_blocks):
                bytes_ = carray(as_pointer(source + index * source_bytes), (source_bytes,), np.uint8)
                decode(bytes_, codes, factors, numbers)
                make_values(codes, factors, scratch + _NUMBERS, values)
                at = (row * num_blocks + index) * num_values
                for first in range(0, num_values, GROUP):
                    if is_float:
                        store(args[_OUT], at + first, load(scratch + _VALUES, first))
                    else:
                        store_half(args[_OUT], at + first, load(scratch + _VALUES, first))

    return look_up
