"""Packs weights into panels in compiled code, straight from the rows of a file.

A thread takes a panel's super-blocks apart row by row, in a few hundred bytes of scratch, and writes words,
factors and numbers to their places. Nothing else of the weight's size is made.
"""

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
from specray.engine.cpu.gemm.quantized.layout import BLOCK_LAYOUTS, Layout, Numbers
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import APART, Kernel, ThreadPool, as_pointer
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.quantization import GROUP
from specray.errors import ConfigError

_PANELS_PER_PART = 4
_MAX_PARTS = 1 << 10
_SOURCE, _ROW_BYTES, _NUM_ROWS, _NUM_BLOCKS, _PANELS, _SCRATCH, _SCRATCH_SIZE = range(7)
_NUM_ARGS = 7
_FACTORS, _NUMBERS, _IS_BAD, _CODES = 0, 64, 128, 192
"""Bytes before each of what a part's scratch holds."""

_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def pack_blocks(weight: BlockWeight, panels: torch.Tensor, thread_pool: ThreadPool) -> None:
    """Packs blocks of a file into panels ``[panels, super-blocks, block_bytes]``, whose last is zeros where
    it has no row.

    Raises:
        ConfigError: a scale or minimum of the file is NaN or infinite.
    """
    rows = weight.rows if weight.rows.stride(1) == 1 else weight.rows.contiguous()
    if _run(_blocks_kernel(weight.kind), rows, panels, thread_pool):
        raise ConfigError(
            f"a weight of type {weight.kind.value!r} holds a scale that is NaN or infinite; allowed: finite "
            "numbers (the file is damaged, or was written so)"
        )


def pack_codes(layout: Layout, codes: torch.Tensor, panels: torch.Tensor, thread_pool: ThreadPool) -> None:
    """Packs codes ``[out_features, in_features]`` and nothing else: int8, signed ones of 8 bits or those of 4
    bits as the layout has them, or floats of the layout's type."""
    _run(_codes_kernel(layout), codes.contiguous().view(torch.uint8), panels, thread_pool)


def _run(kernel_: Kernel, rows: torch.Tensor, panels: torch.Tensor, thread_pool: ThreadPool) -> bool:
    num_parts = max(1, min(len(panels) // _PANELS_PER_PART, _MAX_PARTS))
    num_codes = rows.shape[1] // panels.shape[1]
    scratch_size = -(-(_CODES + num_codes) // APART) * APART
    scratch = torch.zeros(num_parts, scratch_size, dtype=torch.uint8)
    addresses = rows.data_ptr(), rows.stride(0), len(rows), panels.shape[1], panels.data_ptr()
    args = np.array([*addresses, scratch.data_ptr(), scratch_size], dtype=np.int64)
    thread_pool.run(kernel_, args.ctypes.data, num_parts)
    return bool(scratch[:, _IS_BAD].any())


@functools.cache
def _blocks_kernel(kind: BlockType) -> Kernel:
    make = functools.partial(_make_pack, BLOCK_LAYOUTS[kind], DECODE[kind], kind.size.num_bytes)
    return Kernel(f"pack-{kind.value}", _NUM_ARGS, make)


@functools.cache
def _codes_kernel(layout: Layout) -> Kernel:
    offset, num_bytes = (
        layout.offset if layout.bits == 8 else 0,
        layout.num_groups * GROUP * _code_size(layout),
    )

    @kernel()
    def decode(block: Any, codes: Any, factors: Any, numbers: Any) -> None:
        for index in range(num_bytes):
            codes[index] = block[index] + offset

    make = functools.partial(_make_pack, layout, decode, num_bytes, has_numbers=False)
    return Kernel(f"pack-codes-{layout.name}", _NUM_ARGS, make)


def _code_size(layout: Layout) -> int:
    """Bytes of a code that was taken apart."""
    return layout.feature_bytes // PANEL if layout.table.is_float else 1


def _make_pack(layout: Layout, decode: Any, source_bytes: int, *, has_numbers: bool = True) -> Any:
    is_float, num_groups, code_size = layout.table.is_float, layout.num_groups, _code_size(layout)
    store = _make_store_floats(layout) if is_float else _make_store_words(layout)
    lane_bytes = code_size if is_float else 4
    code_bytes, factor_bytes = layout.code_bytes, layout.factor_bytes
    factors_offset, numbers_offset = layout.factors_offset, layout.numbers_offset
    number_bytes, block_bytes = layout.number_bytes, layout.block_bytes
    num_factors = layout.num_factors if has_numbers else 0
    num_numbers = 1 + (layout.minimums is not Numbers.NONE) if has_numbers else 0
    is_float32, num_codes = layout.is_float32, num_groups * GROUP * code_size
    infinite = 0x7F800000 if is_float32 else 0x7C00

    @kernel()
    def place_row(codes: int, factors: Any, numbers: Any, block: int, lane: int) -> bool:
        """Writes what a row's super-block was taken apart into; returns whether a number is not finite."""
        is_bad = False
        for group in range(num_groups):
            store(codes + group * GROUP * code_size, block + group * code_bytes + lane * lane_bytes)
            own = carray(as_pointer(block + factors_offset + group * factor_bytes), (factor_bytes,), np.uint8)
            for index in range(num_factors):
                own[index * PANEL + lane] = factors[group * num_factors + index]
        for index in range(num_numbers):
            number, place = numbers[index], block + numbers_offset + index * number_bytes
            is_bad |= number & infinite == infinite
            if is_float32:
                carray(as_pointer(place), (PANEL,), np.uint32)[lane] = number
            else:
                carray(as_pointer(place), (PANEL,), np.uint16)[lane] = number
        return is_bad

    def pack(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        num_rows, num_blocks = args[_NUM_ROWS], args[_NUM_BLOCKS]
        scratch = args[_SCRATCH] + part * args[_SCRATCH_SIZE]
        codes = carray(as_pointer(scratch + _CODES), (num_codes,), np.uint8)
        factors = carray(as_pointer(scratch + _FACTORS), (64,), np.uint8)
        numbers = carray(as_pointer(scratch + _NUMBERS), (2,), np.int32)
        num_panels, is_bad = (num_rows + PANEL - 1) // PANEL, False
        for panel in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            for index in range(num_blocks):
                block = args[_PANELS] + (panel * num_blocks + index) * block_bytes
                for lane in range(min(PANEL, num_rows - panel * PANEL)):
                    source = args[_SOURCE] + (panel * PANEL + lane) * args[_ROW_BYTES] + index * source_bytes
                    bytes_ = carray(as_pointer(source), (source_bytes,), np.uint8)
                    decode(bytes_, codes, factors, numbers)
                    is_bad |= place_row(scratch + _CODES, factors, numbers, block, lane)
        if is_bad:
            carray(as_pointer(scratch + _IS_BAD), (1,), np.uint8)[0] = 1

    return pack


def _make_store_floats(layout: Layout) -> Any:
    """Makes ``(codes, place)``, both addresses: writes 32 floats as one output feature's of a group."""
    kind = np.uint16 if _code_size(layout) == 2 else np.uint8

    @kernel()
    def store_floats(codes: int, place: int) -> None:
        source = carray(as_pointer(codes), (GROUP,), kind)
        target = carray(as_pointer(place), (GROUP * PANEL,), kind)
        for index in range(GROUP):
            target[index * PANEL] = source[index]

    return store_floats


def _make_store_words(layout: Layout) -> Any:
    """Makes ``(codes, place)``, both addresses: writes 32 bytes as the words of one output feature."""
    bits, per_lane = layout.bits, layout.per_lane

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, place = args
        kind = ir.VectorType(_BYTE, GROUP)
        loaded = builder.load(builder.inttoptr(source, kind.as_pointer()))
        loaded.align = 1
        pairs = builder.bitcast(
            builder.zext(loaded, ir.VectorType(_INT16, GROUP)), ir.VectorType(_INT32, GROUP // 2)
        )
        whole = None
        for slot in range(per_lane):
            places = [word * per_lane + slot for word in range(bits)]
            some = builder.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(_INT32, bits), places))
            shift = ir.Constant(some.type, [slot * bits] * bits)
            whole = (
                builder.shl(some, shift) if whole is None else builder.or_(whole, builder.shl(some, shift))
            )
        words = [builder.extract_element(whole, ir.Constant(_INT32, word)) for word in range(bits)]
        for pair in range(per_lane * bits, GROUP // 2):
            number = builder.extract_element(pairs, ir.Constant(_INT32, pair))
            for word, target, width, first in layout.pieces(pair):
                mask = ir.Constant(_INT32, ((1 << width) - 1) * 0x0001_0001)
                piece = builder.and_(builder.lshr(number, ir.Constant(_INT32, first)), mask)
                words[word] = builder.or_(words[word], builder.shl(piece, ir.Constant(_INT32, target)))
        for index, word in enumerate(words):
            address = builder.add(place, ir.Constant(_INT64, index * PANEL * 4))
            builder.store(word, builder.inttoptr(address, _INT32.as_pointer())).align = 4
        return context.get_dummy_value()

    def store_words(context: Any, codes: Any, place: Any) -> Any:
        return types.void(types.int64, types.int64), code

    return intrinsic(store_words)
