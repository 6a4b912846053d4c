"""CPU kernels against torch in float64, at the edges of their blocks; a row is the same at any width."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import carray

from specray.engine.attention.base import HeadNorm
from specray.engine.attention.cpu import CpuAttention
from specray.engine.cache.blocks import BlockCache
from specray.engine.cpu import compiled as compiled_module
from specray.engine.cpu import norm as norm_module
from specray.engine.cpu.attention import kernel as attention_module
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.attention.scores import TILE, scores_kernel
from specray.engine.cpu.compiled import source_files
from specray.engine.cpu.gemm import linear as linear_module
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear, can_tile
from specray.engine.cpu.isa import Isa, usable_isas
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.simd import vectors
from specray.engine.cpu.thread_pool import Kernel, ThreadPool, as_pointer
from specray.engine.step import AttentionStep, CacheShape, SequenceRows
from tests.pairwise import pairs
from tests.unit.engine.cpu.kernel_processes import normed_sum, normed_sum_of_cached, pool_size
from tests.unit.engine.processes import answer_of

pytestmark = pytest.mark.slow

needs_instruction = pytest.mark.skipif(
    not can_tile(torch.empty(64, 32, dtype=torch.bfloat16)), reason="no AVX-512 here"
)
MAX_LEN = 96
KERNELS = Path(compiled_module.__file__).parent
ALONE = ThreadPool(1)


def use_isa(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where the machine has no such instructions."""
    if isa not in usable_isas():
        pytest.skip(f"no {isa} here")
    monkeypatch.setattr(linear_module, "fastest_isa", lambda: isa)
    monkeypatch.setattr(tiles, "is_usable", lambda: isa is Isa.AMX)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(head_dim: int) -> torch.Tensor:
    return torch.outer(torch.arange(MAX_LEN), 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim / 2)))


def fused(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, thread_pool: ThreadPool = ALONE
) -> CpuAttention:
    kernel = attention_kernel(head_dim, str(dtype).removeprefix("torch."))
    table = angles(head_dim)
    return CpuAttention(
        kernel, thread_pool, num_heads, num_kv_heads, head_dim, table.cos(), table.sin(), head_dim**-0.5
    )


def empty_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> BlockCache:
    return BlockCache(
        CacheShape(1, num_kv_heads, head_dim),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def expected(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, *, window: int | None, norm: HeadNorm | None
) -> torch.Tensor:
    """Attention of one sequence from its first token on, in float64."""
    length, _, head_dim = qkv.shape
    heads = qkv.double()
    rotated = heads[:, : num_heads + num_kv_heads]
    if norm is not None:
        rotated = rotated / (rotated.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    cos, sin = (f(angles(head_dim).double())[:length, None] for f in (torch.cos, torch.sin))
    low, high = rotated.chunk(2, -1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    query, keys = rotated[:, :num_heads], rotated[:, num_heads:]
    group_size = num_heads // num_kv_heads
    keys, values = (
        part.repeat_interleave(group_size, 1) for part in (keys, heads[:, num_heads + num_kv_heads :])
    )
    scores = torch.einsum("qhd,khd->hqk", query, keys) * head_dim**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_hidden = (distance < 0) | (distance >= (window or MAX_LEN))
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pairs(
    head_dim=(8, 32, 64, 80),
    heads=((2, 2), (4, 2), (6, 1)),
    window=(None, 5, 17),
    has_norm=(False, True),
    block_size=(16, 7, MAX_LEN),
)
def test_ragged_attention_equals_float64(
    head_dim: int, heads: tuple[int, int], window: int | None, has_norm: bool, block_size: int
) -> None:
    """Three sequences of different lengths in scattered blocks, computed chunk by chunk, side by side."""
    num_heads, num_kv_heads = heads
    lengths = (37, 16, 50)
    norm = HeadNorm(random(num_heads + num_kv_heads, head_dim, seed=9), 1e-6) if has_norm else None
    inputs = [random(length, num_heads + 2 * num_kv_heads, head_dim, seed=length) for length in lengths]
    per_sequence = -(-MAX_LEN // block_size)
    order = torch.randperm(3 * per_sequence, generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [order[index::3] for index in range(3)]
    cache = empty_cache(3 * per_sequence, block_size, num_kv_heads, head_dim, torch.float32)
    attention = fused(num_heads, num_kv_heads, head_dim, torch.float32)
    outputs: list[list[torch.Tensor]] = [[], [], []]
    starts = [0, 0, 0]
    for chunk in (1, 3, 12, 1, 40):
        rows, pieces, first_row = [], [], 0
        for index, length in enumerate(lengths):
            count = min(chunk, length - starts[index])
            if count > 0:
                rows.append(SequenceRows(first_row, count, starts[index], blocks[index]))
                pieces.append(inputs[index][starts[index] : starts[index] + count])
                first_row += count
        step = AttentionStep(tuple(rows), cache)
        out = attention.prepare(step, slice(0, 0)).attend(0, torch.cat(pieces).flatten(1), norm, window)
        present = [index for index, length in enumerate(lengths) if starts[index] < length]
        for index, row in zip(present, rows, strict=True):
            outputs[index].append(out[row.first_row : row.first_row + row.num_rows])
            starts[index] += row.num_rows
    for index, qkv in enumerate(inputs):
        reference = expected(qkv, num_heads, num_kv_heads, window=window, norm=norm)
        torch.testing.assert_close(torch.cat(outputs[index]).double(), reference, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_bit_for_bit_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    """So the number of rows in a verification cannot change a token, in bfloat16 either."""
    attention, norm = fused(4, 2, 32, dtype), FusedRMSNorm(random(64, dtype=dtype, seed=3), 1e-6, ALONE)
    qkv = random(60, 8 * 32, dtype=dtype)
    results = []
    for chunks in ([60 // 4] * 4, [1] * 60, [31, 1, 5, 20, 3]):
        cache, start, rows = empty_cache(1, MAX_LEN, 2, 32, dtype), 0, []
        for count in chunks:
            step = AttentionStep((SequenceRows(0, count, start, [0]),), cache)
            rows.append(
                attention.prepare(step, slice(0, 0)).attend(0, qkv[start : start + count].clone(), None, None)
            )
            start += count
        results.append(torch.cat(rows))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    hidden = random(9, 64, dtype=dtype)
    assert torch.equal(norm(hidden), torch.cat([norm(row[None]) for row in hidden]))


def test_what_lay_in_the_scratch_reaches_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen scores are written even for a tile cut short by a block's end or the window's beginning."""
    qkv = random(40, 8, 32, seed=2)
    attention, cache = fused(4, 2, 32, torch.float32), empty_cache(14, 7, 2, 32, torch.float32)
    blocks = list(range(13, -1, -1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda size: torch.full((size,), float("nan")))
        steps = [
            attention.prepare(AttentionStep((SequenceRows(0, count, start, blocks),), cache), slice(0, 0))
            for start, count in ((0, 33), (33, 7))
        ]
    for window in (None, 6):
        pieces = [
            step.attend(0, piece.flatten(1), None, window)
            for step, piece in zip(steps, qkv.split((33, 7)), strict=True)
        ]
        reference = expected(qkv, 4, 2, window=window, norm=None)
        torch.testing.assert_close(torch.cat(pieces).double(), reference, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 8, 24, 64, 80])
def test_scores_of_a_tile_in_the_order_of_its_tokens(head_dim: int) -> None:
    """Heads of one register, of several, and of less than one."""
    scores = scores_kernel(head_dim)

    def kernel(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (3,), np.int64)
        scores(args[0], args[0] + head_dim * 4, args[1], args[2], args[2] + TILE * 4)

    queries, tile, out = random(2, head_dim), random(TILE, head_dim, seed=1), torch.empty(2, TILE)
    args = np.array([x.data_ptr() for x in (queries, tile, out)], dtype=np.int64)
    ALONE.run(Kernel(None, 3, lambda: kernel), args.ctypes.data, 1)
    torch.testing.assert_close(out.double(), queries.double() @ tile.double().T, atol=1e-5, rtol=1e-5)


def test_long_sequences_beside_short_ones() -> None:
    """Above the kernel's maximum of queries torch attends, reading what the kernel rotated and stored."""
    attention = fused(4, 2, 32, torch.float32)
    cache = empty_cache(2, MAX_LEN, 2, 32, torch.float32)
    inputs = [random(90, 8, 32, seed=5), random(3, 8, 32, seed=6)]
    rows = (SequenceRows(0, 90, 0, [1]), SequenceRows(90, 3, 0, [0]))
    step = attention.prepare(AttentionStep(rows, cache), slice(0, 0))
    out = step.attend(0, torch.cat(inputs).flatten(1), None, None)
    reference = torch.cat([expected(qkv, 4, 2, window=None, norm=None) for qkv in inputs])
    torch.testing.assert_close(out.double(), reference, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("size", [1, 6, 40, 64, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    rows, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    exact = rows.double() / (rows.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    # bfloat16 is rounded once, to the nearest.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        FusedRMSNorm(weight, 1e-5, ALONE)(rows).double(), exact, atol=0.0, rtol=tolerance
    )


def test_exponential() -> None:
    wide = vectors(16)
    load, store, exp = wide.load, wide.store, wide.exp

    def kernel(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (2,), np.int64)
        for place in range(0, 4096, 16):
            store(args[1], place, exp(load(args[0], place)))

    numbers = torch.linspace(-86.9, 88.0, 4096)
    out = torch.empty_like(numbers)
    args = np.array([numbers.data_ptr(), out.data_ptr()], dtype=np.int64)
    ALONE.run(Kernel(None, 2, lambda: kernel), args.ctypes.data, 1)
    torch.testing.assert_close(out.double(), numbers.double().exp(), atol=0.0, rtol=2e-7)


@needs_instruction
@pairs(
    isa=Isa,
    num_rows=(1, 2, 7, 14, 15, 16, 17, 32, 33, 129, 300),
    shape=((64, 32), (96, 64), (7, 96), (200, 1184), (700, 64), (65, 50), (40, 300)),
    dtype=(torch.bfloat16, torch.float32),
)
def test_tiled_linear_equals_float64(
    isa: Isa, num_rows: int, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at the edges of tiles, more than a tile or the cache holds, a partial panel or block, more blocks
    or panels than are processed at once. Numbers of rows in between: see the next test."""
    use_isa(isa, monkeypatch)
    size, in_features = shape
    rows = random(num_rows, in_features, dtype=dtype)
    weight, other = (random(size, in_features, dtype=dtype, seed=seed) for seed in (1, 2))
    bias, other_bias = (random(size, dtype=dtype, seed=seed) for seed in (3, 4))
    summand = random(num_rows, size, dtype=dtype, seed=5)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    other_exact = torch.nn.functional.linear(rows.double(), other.double(), other_bias.double())
    error = 1e-6 * in_features
    linear = TiledLinear(weight, bias, ALONE)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(linear.precise(rows).double(), exact, atol=error, rtol=1e-5)
    torch.testing.assert_close(linear(rows).double(), exact, atol=error, rtol=rounding)
    torch.testing.assert_close(
        linear.plus(rows, summand).double(), exact + summand.double(), atol=error, rtol=rounding
    )
    gated = TiledGate(weight, other, bias, other_bias, ALONE)(rows).double()
    torch.testing.assert_close(
        gated, torch.nn.functional.silu(exact) * other_exact, atol=30 * error, rtol=2 * rounding
    )
    without = TiledLinear(weight, None, ALONE).precise(rows).double()
    torch.testing.assert_close(without, exact - bias.double(), atol=error, rtol=1e-5)


@needs_instruction
@pytest.mark.parametrize(
    ("dtype", "in_features"), [(torch.bfloat16, 1184), (torch.bfloat16, 1170), (torch.float32, 1170)]
)
@pytest.mark.parametrize("isa", Isa)
def test_tiled_linear_is_bit_for_bit_the_same_at_any_width(
    isa: Isa, dtype: torch.dtype, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_isa(isa, monkeypatch)
    linear = TiledLinear(random(130, in_features, dtype=dtype), None, ALONE)
    rows = random(300, in_features, dtype=dtype, seed=1)
    whole = linear.precise(rows)
    for width in (*range(1, 20), 29, 32, 33, 40, 128, 129, 257):
        pieces = [linear.precise(piece.contiguous()) for piece in rows.split(width)]
        assert torch.equal(whole, torch.cat(pieces)), width


@needs_instruction
def test_no_rows_touch_nothing() -> None:
    """A step that only fills the cache has no rows after its last attention."""
    weight = random(64, 32, dtype=torch.bfloat16)
    linear, gate = TiledLinear(weight, None, ALONE), TiledGate(weight, weight, None, None, ALONE)
    none = torch.empty(0, 32, dtype=torch.bfloat16)
    assert linear.plus(none, torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    assert gate(none).shape == linear.precise(none).shape == (0, 64)


@needs_instruction
def test_gate_of_very_negative_numbers_is_zero_and_not_nan() -> None:
    weight = torch.full((64, 32), -100.0, dtype=torch.bfloat16)
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    assert TiledGate(weight, -weight, None, None, ALONE)(ones).abs().max() < 1e-30


@needs_instruction
def test_threads_do_every_part_once_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores and many small jobs, so that helpers come late, sleep and wake."""
    monkeypatch.setattr(attention_module, "MIN_SHARED_WORK", 1)
    monkeypatch.setattr(linear_module, "MIN_SHARED_WEIGHTS", 1)
    monkeypatch.setattr(norm_module, "MIN_SHARED_SIZE", 1)
    weight = random(1000, 64, dtype=torch.bfloat16)
    rows, qkv = random(9, 64, dtype=torch.bfloat16), random(60, 8 * 32, dtype=torch.bfloat16)
    results = []
    for thread_pool in (ALONE, ThreadPool(4)):
        linear, norm = TiledLinear(weight, None, thread_pool), FusedRMSNorm(weight[0], 1e-6, thread_pool)
        cache = empty_cache(1, MAX_LEN, 2, 32, torch.bfloat16)
        step = AttentionStep((SequenceRows(0, 60, 0, [0]),), cache)
        attention = fused(4, 2, 32, torch.bfloat16, thread_pool)
        for index in range(300):
            found = (
                linear.precise(norm(rows)),
                attention.prepare(step, slice(0, 0)).attend(0, qkv.clone(), None, None),
            )
            if index % 100 == 0:
                time.sleep(0.01)
            results.append(found)
    for logits, attended in results:
        assert torch.equal(logits, results[0][0]) and torch.equal(attended, results[0][1])


def test_a_dropped_thread_pool_ends_its_threads() -> None:
    before = set(threading.enumerate())
    thread_pool = ThreadPool(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del thread_pool
    gc.collect()
    for helper in helpers:
        helper.join(5.0)
    assert not any(helper.is_alive() for helper in helpers)


def test_kernels_from_the_cache_compute_the_same(tmp_path: Path) -> None:
    """A second process loads the first one's code, a third does not trust a broken file."""
    first = answer_of(normed_sum, tmp_path)
    files = sorted(tmp_path.glob(".cache/specray/kernels/*/*"))
    assert [path.name for path in files] == [
        "help.bin",
        "lead.bin",
        "lead_all.bin",
        "norm-float32-float32-4.bin",
    ]
    assert answer_of(normed_sum_of_cached, tmp_path) == first
    files[3].write_bytes(files[3].read_bytes()[:-1])
    assert answer_of(normed_sum, tmp_path) == first
    with pytest.raises(EOFError):
        files[3].write_bytes(files[3].read_bytes()[:-1])
        answer_of(normed_sum_of_cached, tmp_path)


def test_compiled_kernels_are_known_by_all_their_sources() -> None:
    """Sources of inner packages count too; else a cached kernel would survive a change of its source."""
    sources = set(source_files())
    assert {KERNELS / "simd.py", KERNELS / "attention" / "amx" / "weights.py"} <= sources
    engine = KERNELS.parent
    assert {path for path in engine.rglob("*.py") if "CompiledFunction(" in path.read_text()} <= sources


def test_without_a_place_to_keep_them_kernels_are_compiled(tmp_path: Path) -> None:
    home = tmp_path / "a-file"
    home.write_text("not a directory")
    assert answer_of(pool_size, home) == 2
