"""Attention with AMX against float64, at the edges of its registers, groups and chunks."""

import pytest
import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.cpu.attention import attend as vector_attend
from specray.engine.cpu.attention import kernel as attention_module
from specray.engine.cpu.attention.amx import attend as amx_attend
from specray.engine.cpu.attention.amx.attend import fits
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.step import AttentionStep, SequenceRows
from specray.engine.visibility import branch_visibility
from tests.pairwise import pairs
from tests.unit.engine.cpu.test_kernels import ALONE, MAX_LEN, empty_cache, expected, fused, random

pytestmark = pytest.mark.skipif(not tiles.is_usable(), reason="no AMX here")

ROUNDING = 0.03
"""Largest output error of 8-bit queries and weights; one token too many or few changes outputs by 0.3 or
more."""


def attend_pieces(
    qkv: torch.Tensor,
    pieces: tuple[int, ...],
    heads: tuple[int, int],
    *,
    window: int | None = None,
    block_size: int = MAX_LEN,
    norm: HeadNorm | None = None,
    thread_pool: ThreadPool = ALONE,
) -> torch.Tensor:
    """Attention of one sequence in scattered blocks, some rows at a time."""
    num_blocks = -(-MAX_LEN // block_size)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    cache = empty_cache(num_blocks, block_size, heads[1], qkv.shape[2], torch.bfloat16)
    attention, start, outputs = fused(*heads, qkv.shape[2], torch.bfloat16, thread_pool), 0, []
    for count in pieces:
        step = attention.prepare(AttentionStep((SequenceRows(0, count, start, blocks),), cache), slice(0, 0))
        rows = qkv[start : start + count].clone().flatten(1)
        outputs.append(step.attend(0, rows, norm, window))
        start += count
    return torch.cat(outputs)


@pairs(
    head_dim=(32, 64, 96, 128),
    heads=((4, 2), (8, 8), (6, 1), (40, 2)),
    window=(None, 7, 40),
    has_norm=(False, True),
    block_size=(16, 7, MAX_LEN),
)
def test_equals_float64(
    head_dim: int, heads: tuple[int, int], window: int | None, has_norm: bool, block_size: int
) -> None:
    """Rows before, across and after the end of a chunk; groups of several heads, heads of several groups."""
    num_heads, num_kv_heads = heads
    weights = random(num_heads + num_kv_heads, head_dim, dtype=torch.bfloat16, seed=9)
    norm = HeadNorm(weights, 1e-6) if has_norm else None
    qkv = random(81, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    out = attend_pieces(
        qkv, (3, 5, 33, 1, 1, 20, 1, 1, 16), heads, window=window, block_size=block_size, norm=norm
    )
    reference = expected(qkv, num_heads, num_kv_heads, window=window, norm=norm)
    scale = 1.0 if norm is None else 2.0
    torch.testing.assert_close(out.double(), reference, atol=scale * ROUNDING, rtol=0.02)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("heads", [(4, 2), (16, 8), (3, 3), (40, 2)])
def test_a_row_is_bit_for_bit_the_same_alone_and_among_others(
    heads: tuple[int, int], window: int | None
) -> None:
    qkv = random(90, heads[0] + 2 * heads[1], 64, dtype=torch.bfloat16)
    alone = attend_pieces(qkv, (1,) * 90, heads, window=window)
    for pieces in ((90,), (31, 1, 5, 20, 33), (8,) * 10 + (9, 1)):
        assert torch.equal(attend_pieces(qkv, pieces, heads, window=window), alone)


@pytest.mark.parametrize("window", [None, 6])
def test_what_lay_in_the_scratch_reaches_no_row(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Unused columns, tokens and registers are computed too."""
    qkv, pieces = random(75, 10, 64, dtype=torch.bfloat16), (33, 7, 1, 29, 5)
    clean = attend_pieces(qkv, pieces, (6, 2), window=window, block_size=7)
    zeros = torch.zeros

    def full_of_nan(*shape: int, **options: object) -> torch.Tensor:
        is_scratch = len(shape) == 1 and not options
        return torch.full(shape, float("nan")) if is_scratch else zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", full_of_nan)
    assert torch.equal(attend_pieces(qkv, pieces, (6, 2), window=window, block_size=7), clean)


@pytest.mark.parametrize("window", [None, 9])
def test_branches_see_their_prefix_and_themselves(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """The result is that of the kernel without AMX on the same bfloat16 cache."""
    qkv = random(75, 8, 32, dtype=torch.bfloat16)
    branches = tuple(
        branch_visibility(prefix_len, first_index, num_rows)
        for prefix_len, first_index, num_rows in (
            (66, 70, 1), (66, 70, 2), (61, 72, 1), (68, 73, 1), (68, 73, 2)
        )
    )  # fmt: skip
    outputs = []
    for has_amx in (True, False):
        monkeypatch.setattr(tiles, "is_usable", lambda has_amx=has_amx: has_amx)
        attention, cache = fused(4, 2, 32, torch.bfloat16), empty_cache(1, MAX_LEN, 2, 32, torch.bfloat16)
        for rows in (SequenceRows(0, 70, 0, [0]), SequenceRows(0, 5, 61, [0], branches)):
            some = qkv[:70] if not rows.visibility else qkv[70:]
            step = attention.prepare(AttentionStep((rows,), cache), slice(0, 0))
            out = step.attend(0, some.clone().flatten(1), None, window)
        outputs.append(out)
    torch.testing.assert_close(outputs[0], outputs[1], atol=ROUNDING, rtol=0.02)


def test_sequences_of_one_step_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, with parts that begin amid a sequence's heads; keys of the next one are prefetched."""
    monkeypatch.setattr(attention_module, "MIN_SHARED_WORK", 1)
    lengths, heads, blocks = (70, 1, 64, 17, 90), (16, 8), [[3], [0], [4], [1], [2]]
    inputs = [random(length, 32, 64, dtype=torch.bfloat16, seed=length) for length in lengths]
    alone = [attend_pieces(qkv, (len(qkv) - 1, 1) if len(qkv) > 1 else (1,), heads)[-1] for qkv in inputs]
    attention = fused(*heads, 64, torch.bfloat16, ThreadPool(2))
    cache = empty_cache(5, MAX_LEN, 8, 64, torch.bfloat16)
    for is_last in (False, True):
        rows, pieces = [], []
        for qkv, block in zip(inputs, blocks, strict=True):
            start, end = (len(qkv) - 1, len(qkv)) if is_last else (0, len(qkv) - 1)
            if start < end:
                rows.append(SequenceRows(sum(map(len, pieces)), end - start, start, block))
                pieces.append(qkv[start:end])
        step = attention.prepare(AttentionStep(tuple(rows), cache), slice(0, 0))
        out = step.attend(0, torch.cat(pieces).flatten(1), None, None)
    assert torch.equal(out, torch.stack(alone))


@pytest.mark.parametrize(("head_dim", "has_amx"), [(32, True), (128, True), (80, False), (256, False)])
def test_heads_of_other_sizes_go_without(head_dim: int, has_amx: bool) -> None:
    assert fits(head_dim) is has_amx
    num_queries = attention_kernel(head_dim, "bfloat16").max_queries
    assert num_queries == (amx_attend.MAX_QUERIES if has_amx else vector_attend.MAX_QUERIES)
