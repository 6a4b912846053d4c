"""The kernel of open rows computes what torch's operators do, and plain decoding's bits."""

from __future__ import annotations

import pytest
import torch

from specray.engine.cache.state_pool import StatePool
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.layers.convolution import ShortConvolution
from specray.engine.model.layers.delta import GatedDelta, Mixer
from specray.engine.model.layers.mixer_lowering import PlainMixer
from specray.engine.model.layers.mixers.mamba import GroupNorm, Mamba
from specray.engine.model.operators_cpu import KernelOperators
from specray.engine.step import SequenceRows, StateShape

CPU = torch.device("cpu")
SHAPES = {
    "delta-8x12": StateShape(4, 2, 8, 12, 1, 2 * 16 + 48, 4),
    "delta-32x64": StateShape(4, 4, 32, 64, 1, 2 * 128 + 256, 3),
    # Channels that are no multiple of a vector.
    "delta-10x6": StateShape(3, 1, 10, 6, 1, 2 * 10 + 18, 2),
    # A decay for each of a key's numbers.
    "kimi-16x32": StateShape(2, 2, 16, 32, 16, 2 * 32 + 64, 4),
    # The same, and they have a bound.
    "ling-16x32": StateShape(2, 2, 16, 32, 16, 2 * 32 + 64, 4),
    # Two groups, and two pieces of work in each.
    "mamba-16x32": StateShape(8, 4, 16, 32, 1, 2 * 32 + 256, 4),
    "mamba-10x6": StateShape(3, 1, 10, 6, 1, 2 * 10 + 18, 2),
    "convolution-48": StateShape(0, 0, 0, 0, 1, 48, 3),
    "convolution-600": StateShape(0, 0, 0, 0, 1, 600, 7),
}
GROUPS = {"mamba-16x32": 2, "mamba-10x6": 1}


def make_mixer(name: str) -> PlainMixer:
    torch.manual_seed(0)
    shape = SHAPES[name]
    heads, taps = shape.num_heads, torch.randn(shape.num_taps, shape.num_channels)
    if name.startswith("convolution"):
        return ShortConvolution(shape, taps, torch.randn(shape.num_channels))
    rates, bias = torch.rand(heads) + 0.1, torch.randn(heads)
    if name.startswith(("delta", "kimi", "ling")):
        bias, norm = torch.randn(heads * shape.gate_dim), torch.rand(shape.value_dim)
        least = -5.0 if name.startswith("ling") else None
        return GatedDelta(shape, taps, rates, bias, norm, 1e-6, 2.0, not name.startswith("delta"), least)
    group_norm = GroupNorm(torch.rand(GROUPS[name], heads * shape.value_dim // GROUPS[name]), 1e-6)
    channels, skips = torch.randn(shape.num_channels), torch.randn(heads)
    return Mamba(shape, GROUPS[name], taps, channels, rates, bias, skips, group_norm, (0.01, 2.0), 1.5, 0.5)


def make_kernel(name: str, dtype: torch.dtype, num_threads: int) -> Mixer:
    return KernelOperators(dtype, num_threads, ThreadPool(num_threads)).mixer(make_mixer(name))


def make_pool(shape: StateShape, dtype: torch.dtype) -> StatePool:
    """Whose memory holds NaN."""
    pool = StatePool([shape, shape], num_slots=3, max_open=8, dtype=dtype, device=CPU)
    pool.layers[1].fill(float("nan"))
    return pool


def projected(name: str, num_rows: int, seed: int) -> torch.Tensor:
    shape = SHAPES[name]
    num_gates = shape.gate_dim + (not name.startswith("mamba"))
    width = shape.num_channels + shape.num_heads * (shape.value_dim + num_gates)
    if name.startswith("convolution"):
        width = 3 * shape.num_channels
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def run(mixer: Mixer, pool: StatePool, rows: torch.Tensor, *parts: tuple[int, int, int, int]) -> torch.Tensor:
    """Parts: of each sequence its slot, its start, and numbers of rows and of open ones."""
    first, sequences = 0, []
    for slot, start, count, num_open in parts:
        sequences.append(SequenceRows(first, count, start, [0], (), slot, num_open))
        first += count
    with pool.step(sequences):
        return mixer(rows, pool, 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, torch.float32 if name in ("delta-8x12", "mamba-16x32", "convolution-600") else torch.bfloat16)
        for name in SHAPES
    ],
)
def test_kernel_and_operators_agree(name: str, dtype: torch.dtype) -> None:
    """Prompts of one token and of several, verifies of which nothing, some and all stays, side by side."""
    mixer, kernel, shape = make_mixer(name), make_kernel(name, dtype, 2), SHAPES[name]
    assert type(kernel) is not type(mixer)
    pools = make_pool(shape, dtype), make_pool(shape, dtype)
    steps = [
        [(0, 0, 1, 1), (2, 0, 70, 4)],
        [(0, 1, 3, 3), (2, 66, 5, 5), (1, 0, 2, 2)],
        [(1, 1, 8, 8), (0, 2, 1, 1), (2, 71, 8, 8)],
        [(2, 72, 1, 1), (1, 9, 8, 8), (0, 3, 20, 1)],
    ]
    for seed, parts in enumerate(steps):
        rows = projected(name, sum(count for _, _, count, _ in parts), seed).to(dtype)
        found, expected = (
            run(each, pool, rows, *parts) for each, pool in zip((kernel, mixer), pools, strict=True)
        )
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["delta-32x64", "kimi-16x32", "ling-16x32", "mamba-16x32", "convolution-600"]
)
@pytest.mark.parametrize("num_open", range(1, 9))
def test_whatever_is_refused_others_have_plain_decodings_bits(num_open: int, name: str) -> None:
    """Beside another sequence, whose rows need not be as many."""
    shape, kernel = SHAPES[name], make_kernel(name, torch.bfloat16, 2)
    right, wrong = (projected(name, 80, seed).bfloat16() for seed in (1, 2))
    plain = make_pool(shape, torch.bfloat16)
    output = torch.cat([run(kernel, plain, right[row : row + 1], (0, row, 1, 1)) for row in range(40)])
    for num_kept in range(num_open + 1):
        pool, at = make_pool(shape, torch.bfloat16), 0
        for round_id in range(4):
            rows = torch.cat((wrong[:2], right[at : at + num_kept], wrong[num_kept:num_open]))
            found = run(kernel, pool, rows, (1, 2 * round_id, 2, 2), (2, at, num_open, num_open))[2:]
            assert torch.equal(found[:num_kept], output[at : at + num_kept])
            at += num_kept
        assert torch.equal(run(kernel, pool, right[at : at + 1], (2, at, 1, 1)), output[at : at + 1])


@pytest.mark.parametrize("name", ["delta-32x64", "kimi-16x32", "mamba-16x32", "convolution-600"])
def test_rows_over_records_that_stay_have_plain_decodings_bits(name: str) -> None:
    """As a draft's: one by one while the state stays; then the next round takes some of them back."""
    shape, kernel = SHAPES[name], make_kernel(name, torch.bfloat16, 2)
    right, wrong = (projected(name, 80, seed).bfloat16() for seed in (1, 2))
    plain = make_pool(shape, torch.bfloat16)
    output = torch.cat([run(kernel, plain, right[row : row + 1], (0, row, 1, 1)) for row in range(40)])
    for num_kept in range(6):
        pool, at = make_pool(shape, torch.bfloat16), 0
        for round_id in range(4):
            # The state ends one token before the round, if there is one.
            num_before = min(at, 1)
            for index in range(6):
                rows = right if index < num_kept else wrong
                step = torch.cat((wrong[:2], rows[at + index : at + index + 1]))
                other, own = (1, 12 * round_id + 2 * index, 2, 2), (2, at + index, 1, num_before + index + 1)
                found = run(kernel, pool, step, other, own)[2:]
                assert pool.bases[2] == at - num_before
                if index < num_kept:
                    assert torch.equal(found, output[at + index : at + index + 1])
            at += num_kept
        assert torch.equal(run(kernel, pool, right[at : at + 1], (2, at, 1, 1)), output[at : at + 1])
