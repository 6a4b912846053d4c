"""Weights in a file's own bits against float64 of their values: every type, edges, any number of rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from specray.engine.activation import Activation
from specray.engine.cpu.gemm.quantized import linear as linear_module
from specray.engine.cpu.gemm.quantized import tile
from specray.engine.cpu.gemm.quantized.embedding import BlockEmbedding
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear, has_kernels
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError
from tests.pairwise import pairs
from tests.unit.engine.cpu.test_kernels import random

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_kernels(), reason="no AVX2 here"),
]
ALONE = ThreadPool(1)
DTYPES = (torch.bfloat16, torch.float32)
HALVES = {
    BlockType.Q4_1: (0, 2),
    BlockType.Q5_1: (0, 2),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
    BlockType.MXFP4: (),
}
"""Bytes of a block before its float16 numbers; of other types they are the first."""
EDGES = (0.0, 2.0**-24, -(2.0**-24), 6.1e-5, 1.0, -0.37, 65504.0)
"""Zero, the smallest, one that is nearly subnormal, and the largest of float16."""
KINDS = tuple(BlockType)


@functools.cache
def blocks(
    kind: BlockType, size: int, in_features: int, seed: int = 0, numbers: tuple[float, ...] = (0.01, -0.02)
) -> BlockWeight:
    """Random bytes, but for the float16 numbers, which are these in turns."""
    num_bytes = kind.size.num_bytes
    count = size * in_features // kind.size.num_values
    drawn = np.random.default_rng(seed).integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for turn, place in enumerate(HALVES.get(kind, (0,))):
        halves = np.resize(np.roll(np.float16(numbers), turn), count)
        drawn[:, place : place + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind is BlockType.MXFP4:
        drawn[:, 0] = 118 + drawn[:, 0] % 16
    return BlockWeight(kind, torch.from_numpy(drawn).view(size, -1))


def stored(*parts: Any) -> StoredWeight:
    return StoredWeight(tuple(parts))


def assert_is_product(
    found: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Up to what float32 sums lose, and integer rows of bfloat16: 2^-16 of the largest of 32, each."""
    exact = torch.nn.functional.linear(
        rows.double(), values.double(), bias if bias is None else bias.double()
    )
    sizes = rows.double().abs() @ values.double().abs().T
    share = 3e-6 if rows.dtype == torch.float32 else 1e-4
    assert bool(((found.double() - exact).abs() <= share * sizes + 1e-30).all())


@pairs(
    kind=KINDS,
    dtype=DTYPES,
    num_rows=(*range(1, 8), 40),
    shape=((64, 256), (7, 512), (200, 1280)),
)
def test_products_are_those_of_the_files_values(
    kind: BlockType, dtype: torch.dtype, num_rows: int, shape: tuple[int, int]
) -> None:
    size, in_features = shape
    weight, other = (blocks(kind, size, in_features, seed) for seed in (1, 2))
    rows, bias = random(num_rows, in_features, dtype=dtype), random(size, dtype=dtype, seed=3)
    layer = QuantizedLinear(stored(weight), bias, ALONE, dtype)
    found = layer.precise(rows)
    assert_is_product(found, rows, weight.values(), bias)
    assert torch.equal(layer(rows), found.to(dtype))
    summand = random(num_rows, size, dtype=dtype, seed=4)
    assert torch.equal(layer.plus(rows, summand), (found + summand.float()).to(dtype))
    gate = QuantizedGate(weight, other, None, None, ALONE, dtype)(rows).double()
    linears = [QuantizedLinear(stored(one), None, ALONE, dtype).precise(rows) for one in (weight, other)]
    expected = torch.nn.functional.silu(linears[0].double()) * linears[1].double()
    torch.testing.assert_close(gate, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_scales_are_held(kind: BlockType) -> None:
    """One weight at a time, so that no sum hides it: a row of a single one gives a column of values."""
    weight = blocks(kind, 33, 256, 5, EDGES)
    rows = torch.eye(256)[::5].contiguous()
    found = QuantizedLinear(stored(weight), None, ALONE, torch.float32).precise(rows)
    values = weight.values()[:, ::5].T
    # A code's and a minimum's share are rounded on their own, relative to themselves.
    sizes = weight.decoded().values().abs().amax(1)
    torch.testing.assert_close(
        found / sizes.clamp_min(1e-30), values / sizes.clamp_min(1e-30), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_look_ups_are_the_files_values_bit_for_bit(kind: BlockType, dtype: torch.dtype) -> None:
    weight = blocks(kind, 70, 512, 7, EDGES)
    ids = torch.tensor([0, 31, 32, 69, 5, 5])
    embedding, expected = BlockEmbedding(weight, ALONE, dtype), weight.values()[ids].to(dtype)
    for threads in (1, 3):
        out = torch.empty(6, 512, dtype=dtype)
        BlockEmbedding(weight, ThreadPool(threads), dtype).into(ids, out)
        assert torch.equal(out, expected) and torch.equal(embedding(ids), expected)
    with pytest.raises(IndexError, match=r"token ids are 3\.\.70; allowed: 0\.\.69"):
        embedding(torch.tensor([3, 70]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_bit_for_bit_the_same_alone_and_among_others(kind: BlockType, dtype: torch.dtype) -> None:
    weight = blocks(kind, 130, 1280)
    layer = QuantizedLinear(stored(weight), None, ALONE, dtype)
    gate = QuantizedGate(weight, weight, None, None, ALONE, dtype)
    rows = random(53, 1280, dtype=dtype, seed=1)
    whole, gated = layer.precise(rows), gate(rows)
    for width in (1, 2, 3, 5, 7, 13, 40):
        pieces = [piece.contiguous() for piece in torch.split(rows, width)]
        assert torch.equal(whole, torch.cat([layer.precise(piece) for piece in pieces])), width
        assert torch.equal(gated, torch.cat([gate(piece) for piece in pieces])), width


@pytest.mark.skipif(tile.fastest_registers() is tile.AVX2, reason="no AVX-512 with dot products here")
@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_give_the_same_bits(kind: BlockType, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = blocks(kind, 70, 1280), random(14, 1280)
    wide = QuantizedLinear(stored(weight), None, ALONE, torch.float32).precise(rows)
    monkeypatch.setattr(linear_module, "fastest_registers", lambda: tile.AVX2)
    narrow = QuantizedLinear(stored(weight), None, ALONE, torch.float32)
    for width in (1, 6, 7, 14):
        assert torch.equal(wide[:width], narrow.precise(rows[:width])), width


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_parts_of_several_types_write_side_by_side(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "MIN_SHARED_WEIGHTS", 1)
    parts = [
        blocks(BlockType.Q4_K, 100, 512), blocks(BlockType.Q8_0, 7, 512), blocks(BlockType.Q6_K, 64, 512)
    ]  # fmt: skip
    layer = QuantizedLinear(stored(*parts), bias := random(171, seed=9), ThreadPool(num_threads), dtype)
    assert (layer.num_weights, layer.in_features) == (171 * 512, 512)
    for num_rows in (1, 5, 40):
        rows = random(num_rows, 512, dtype=dtype)
        summand = random(num_rows, 171, dtype=dtype, seed=2)
        alone = [
            QuantizedLinear(stored(part), some.contiguous(), ALONE, dtype)
            for part, some in zip(parts, bias.split([100, 7, 64]), strict=True)
        ]
        expected = torch.cat([one.precise(rows) for one in alone], 1)
        for _ in range(20):
            assert torch.equal(layer.precise(rows), expected)
            assert torch.equal(layer.plus(rows, summand), (expected + summand.float()).to(dtype))


def test_a_gate_and_its_other_half_may_be_of_different_types() -> None:
    gate, up = blocks(BlockType.Q4_K, 70, 512), blocks(BlockType.Q6_K, 70, 512)
    rows, biases = random(9, 512), [random(70, seed=seed) for seed in (1, 2)]
    found = QuantizedGate(gate, up, *biases, ALONE, torch.float32, Activation.GELU_TANH)(rows)
    products = [
        QuantizedLinear(stored(one), bias, ALONE, torch.float32)(rows)
        for one, bias in zip((gate, up), biases, strict=True)
    ]
    gated, other = (product.double() for product in products)
    expected = (torch.nn.functional.gelu(gated, approximate="tanh") * other).float()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [BlockType.Q4_1, BlockType.Q6_K])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite_is_refused(kind: BlockType, number: float) -> None:
    weight = BlockWeight(kind, blocks(kind, 40, 512).rows.clone())
    place = HALVES[kind][-1]
    weight.rows[39, -kind.size.num_bytes :][place : place + 2] = (
        torch.tensor([number]).half().view(torch.uint8)
    )
    with pytest.raises(ConfigError, match=f"type {kind.value!r} holds a scale that is NaN or infinite"):
        QuantizedLinear(stored(weight), None, ALONE)


@pairs(
    bits=(4, 8),
    group=(32, 64, 256),
    scale=(torch.float16, torch.bfloat16, torch.float32),
    zeros=("none", "middle", "some"),
    size=(64, 37),
)
def test_groups_of_safetensors_have_their_values(
    bits: int, group: int, scale: torch.dtype, zeros: str, size: int
) -> None:
    numbers = np.random.default_rng(0)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    shape = size, 512 // group
    codes = torch.from_numpy(numbers.integers(low, high, (size, 512), dtype=np.int8))
    scales = torch.from_numpy(numbers.normal(size=shape) * 1e-3).to(scale)
    chosen = torch.from_numpy(numbers.integers(low, high + (bits == 4), shape).astype(np.int8))
    weight = GroupedWeight(
        codes,
        scales,
        {"none": None, "middle": torch.full(shape, 8, dtype=torch.int8), "some": chosen}[zeros],
        bits,
    )
    layer = QuantizedLinear(stored(weight), None, ALONE, torch.float32)
    for num_rows in (1, 9):
        rows = random(num_rows, 512)
        assert_is_product(layer.precise(rows), rows, weight.values())


def floats(dtype: torch.dtype, size: int, in_features: int, group: int) -> GroupedWeight:
    """Every finite float of 8 bits, or floats of 16 with their ends; scales of either sign."""
    numbers = torch.Generator().manual_seed(size)
    if dtype == torch.float16:
        drawn = torch.randn(size, in_features, generator=numbers)
        drawn.view(-1)[:7] = torch.tensor(EDGES)
        codes = drawn.half()
    else:
        finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
        places = (torch.arange(size * in_features) * 7) % len(finite)
        codes = finite[places].view(size, in_features).view(torch.float8_e4m3fn)
    scales = torch.randn(size, in_features // group, generator=numbers) * 1e-2
    return GroupedWeight(codes, scales, bits=8 * dtype.itemsize)


FLOATS = (torch.float8_e4m3fn, torch.float16)


@pairs(kind=FLOATS, group=(128, 512), size=(64, 37), dtype=DTYPES)
def test_floats_of_a_file_have_their_values(
    kind: torch.dtype, group: int, size: int, dtype: torch.dtype
) -> None:
    weight, bias = floats(kind, size, 512, group), random(size, seed=3)
    layer = QuantizedLinear(stored(weight), bias, ALONE, dtype)
    rows = random(40, 512, dtype=dtype)
    whole = layer.precise(rows)
    assert_is_product(whole, rows, weight.values(), bias)
    for width in (1, 2, 5, 13):
        pieces = [layer.precise(piece.contiguous()) for piece in torch.split(rows, width)]
        assert torch.equal(whole, torch.cat(pieces)), width
    assert layer.num_bytes >= weight.codes.nbytes


@pytest.mark.parametrize("kind", FLOATS)
def test_each_float_is_multiplied_as_the_number_that_it_is(kind: torch.dtype) -> None:
    """Rows of a single one: what comes out is a weight, with nothing added to it."""
    weight = floats(kind, 64, 512, 128)
    layer = QuantizedLinear(stored(weight), None, ALONE, torch.float32)
    assert torch.equal(layer.precise(torch.eye(512)), weight.values().T)


@pytest.mark.skipif(tile.fastest_registers() is tile.AVX2, reason="no AVX-512 with dot products here")
@pytest.mark.parametrize("kind", FLOATS)
def test_instruction_sets_add_floats_in_one_order(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = floats(kind, 70, 512, 128), random(7, 512)
    wide = QuantizedLinear(stored(weight), None, ALONE, torch.float32).precise(rows)
    monkeypatch.setattr(linear_module, "fastest_registers", lambda: tile.AVX2)
    narrow = QuantizedLinear(stored(weight), None, ALONE, torch.float32)
    assert torch.equal(wide[:1], narrow.precise(rows[:1])) and torch.equal(wide, narrow.precise(rows))
