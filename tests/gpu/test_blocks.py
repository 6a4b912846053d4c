"""Attention from tensors that describe the step equals attention sequence by sequence."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.attention.packed import BatchShape, DeviceBatch, HostBatch, make_batch, split_packed
from specray.engine.attention.paged import PagedAttention, attend_gathered, store_rows
from specray.engine.attention.sdpa import PlainAttention
from specray.engine.attention.select import (
    VARLEN_BLOCK_SIZE,
    Backend,
    Model,
    VarlenAttend,
    check_backend,
    gathered,
)
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.step import HeadShape, PagedBatch, SequenceRows
from tests.gpu.block_cases import (
    CASES,
    LATENT_CASES,
    Case,
    attention_step,
    block_cache,
    row_positions,
    sequence_rows,
)

ATOL = 1e-5


def tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(256)[:, None] / 10 ** (torch.arange(head_dim // 2) * 2 / head_dim)
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("has_head_norm", [False, True])
@pytest.mark.parametrize("case", [*CASES, *LATENT_CASES], ids=lambda case: case.name)
def test_gathered_blocks_equal_plain_attention(case: Case, has_head_norm: bool) -> None:
    shape = case.shape
    rotary = rotary_tables(*tables(shape.head_dim - shape.latent_dim), torch.float32)
    plain = PlainAttention(rotary, shape)
    has_head_norm &= not shape.latent_dim
    blocks = PagedAttention(rotary, shape, gathered(shape))
    weight = torch.rand(shape.num_heads + shape.num_kv_heads, shape.head_dim) + 0.5
    head_norm = HeadNorm(weight, 1e-6) if has_head_norm else None
    rows = sequence_rows(case)
    positions = row_positions(rows)
    width = (shape.num_heads + shape.num_stored) * shape.head_dim
    qkv = torch.randn(len(positions), width)
    outputs, caches = [], []
    for attention in (plain, blocks):
        cache = block_cache(case)
        step = attention.prepare(attention_step(case, cache), positions)
        outputs.append(step.attend(0, qkv.clone(), head_norm, case.window))
        caches.append(cache.layers[0])
    torch.testing.assert_close(outputs[1], outputs[0], atol=ATOL, rtol=0)
    assert torch.equal(caches[0], caches[1])


def test_rows_beyond_their_blocks_are_refused() -> None:
    """numpy would take the only block for all of them."""
    cpu = torch.device("cpu")
    assert make_batch([SequenceRows(0, 16, 0, [5])], 16, cpu).slots.tolist() == list(range(80, 96))
    with pytest.raises(AssertionError):
        make_batch([SequenceRows(0, 17, 0, [5])], 16, cpu)


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_every_part_of_a_batch_lies_where_kernels_want_it(num_rows: int) -> None:
    """Another alignment is another variant to compile, while requests wait."""
    for num_sequences in range(1, 6):
        shape = BatchShape(num_sequences, num_rows, 3, num_rows)
        host = HostBatch(shape, block_size=4, spare_slot=0)
        on_device = DeviceBatch(shape, torch.device("cpu"))
        first = on_device.packed.data_ptr()
        assert [(view.data_ptr() - first) % 16 for view in on_device.views] == [0] * 10
        assert [view.numel() for view in on_device.views] == list(shape.sizes)
        host.packed[:] = range(len(host.packed))
        on_device.load(host)
        for own, other in zip(split_packed(host.packed, shape), on_device.views, strict=True):
            assert own.tolist() == other.tolist()


@pytest.mark.parametrize("case", [*CASES, *LATENT_CASES], ids=lambda case: case.name)
def test_padding_changes_no_row_and_writes_to_the_spare_slot_only(case: Case) -> None:
    rows = sequence_rows(case)
    num_rows = sum(item.num_rows for item in rows)
    max_rows = max(item.num_rows for item in rows)
    cache = block_cache(case)
    query = torch.randn(num_rows, case.shape.num_heads, case.shape.head_dim)
    batch = make_batch(rows, case.block_size, query.device)
    options = {"block_size": case.block_size, "scale": case.shape.scale, "window": case.window}
    attend = gathered(case.shape)
    expected = attend(query, cache.layers[0], batch, **options)  # type: ignore[arg-type]
    padded = BatchShape(
        num_sequences=len(rows) + 2,
        num_rows=(len(rows) + 2) * (max_rows + 1) if max_rows > 1 else len(rows) + 2,
        max_num_blocks=16,
        max_rows=max_rows + (max_rows > 1),
        has_masks=case.with_branches,
    )
    spare_slot = 24 * case.block_size
    host = HostBatch(padded, block_size=case.block_size, spare_slot=spare_slot)
    # What an earlier, fuller step left behind must not matter.
    host.packed[:] = 2
    host.fill(rows, [7] * num_rows)
    on_device = DeviceBatch(padded, query.device)
    on_device.load(host)
    larger = on_device.batch()
    assert larger.slots[:num_rows].tolist() == batch.slots.tolist()
    assert set(larger.slots[num_rows:].tolist()) == {spare_slot}
    assert larger.lengths.tolist() == [*batch.lengths.tolist(), 1, 1]
    for numbers in (larger.positions, larger.kv_indices, larger.prefix_lens, larger.first_indices):
        assert set(numbers[num_rows:].tolist()) == {0}
    assert on_device.token_ids.tolist() == [7] * num_rows + [0] * (padded.num_rows - num_rows)
    long_query = torch.cat((query, torch.randn(padded.num_rows - num_rows, *query.shape[1:])))
    output = attend(long_query, cache.layers[0], larger, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output[:num_rows], expected, atol=ATOL, rtol=0)
    assert output.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["cases", "whole-edges", "split-edges", "trees", "start"])
def test_triton_kernels_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.triton_interpreted", part],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["agreed"]


@pytest.mark.parametrize("broken", ["attend", "store"])
def test_a_kernel_with_other_numbers_is_not_trusted(broken: str) -> None:
    model = Model(HeadShape(4, 2, 16), torch.float32, torch.device("cpu"))
    check_backend(Backend("whole", attend_gathered, store_rows, 4), model)

    def attend(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend_gathered(*arguments, **options) * 1.01

    def store(heads: torch.Tensor, layer: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        query = store_rows(heads, layer, *others)
        layer[0, 0, 0] += 0.1
        return query

    backend = Backend(
        broken,
        attend if broken == "attend" else attend_gathered,
        store if broken == "store" else store_rows,
        4,
    )
    with pytest.raises(ArithmeticError, match="its numbers are off by"):
        check_backend(backend, model)


def test_a_kernel_that_gives_no_numbers_is_not_trusted() -> None:
    model = Model(HeadShape(4, 2, 16), torch.float32, torch.device("cpu"))

    def attend(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend_gathered(*arguments, **options) * float("nan")

    with pytest.raises(ArithmeticError, match="its numbers are off by nan"):
        check_backend(Backend("nothing", attend, store_rows, 4), model)


@pytest.mark.parametrize("window", [None, 5])
def test_torch_takes_what_varlen_is_given(window: int | None) -> None:
    """On tensors without contents: names of arguments, and the shape of what comes out."""
    size = VARLEN_BLOCK_SIZE
    rows = (SequenceRows(0, 3, 300, (4, 2)), SequenceRows(3, 1, 0, (1,)))
    on_cpu = make_batch(rows, size, torch.device("cpu"))
    numbers = {
        field.name: getattr(on_cpu, field.name)
        for field in fields(PagedBatch)
        if isinstance(getattr(on_cpu, field.name), torch.Tensor)
    }
    batch = replace(on_cpu, **{name: tensor.to("meta") for name, tensor in numbers.items()})
    query = torch.empty(4, 6, 64, dtype=torch.bfloat16, device="meta")
    layer = torch.empty(8 * size, 4, 64, dtype=torch.bfloat16, device="meta")
    attend = VarlenAttend(attend_gathered)
    output = attend(query, layer, batch, block_size=size, scale=0.125, window=window)
    assert (output.shape, output.dtype) == ((4, 6 * 64), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "num_heads", "expected"),
    [
        ((SequenceRows(0, 3, 300, (4, 2)), SequenceRows(3, 1, 0, (1,))), 6, 1),
        ((SequenceRows(0, 1, 300, (4, 2)),), 6, None),
        ((SequenceRows(0, 1, 300, (4, 2)),), 2, 1),
    ],
    ids=["rows", "single rows that share heads", "single rows that share none"],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_varlen_splits_only_what_torch_joins_rightly(
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[SequenceRows, ...],
    num_heads: int,
    expected: int | None,
    is_new: bool,
) -> None:
    asked: list[int | None] = []

    def without_splits(
        query: torch.Tensor, *_: Any, block_table: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        assert "num_splits" not in options
        asked.append(None)
        return query

    def with_splits(
        query: torch.Tensor,
        *_: Any,
        block_table: torch.Tensor,
        num_splits: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        asked.append(num_splits)
        return query

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", with_splits if is_new else without_splits)
    query = torch.zeros(sum(item.num_rows for item in rows), num_heads, 64)
    layer = torch.zeros(8 * VARLEN_BLOCK_SIZE, 4, 64)
    batch = make_batch(rows, VARLEN_BLOCK_SIZE, query.device)
    options = {"block_size": VARLEN_BLOCK_SIZE, "scale": 1.0, "window": None}
    VarlenAttend(attend_gathered)(query, layer, batch, **options)  # type: ignore[arg-type]
    assert asked == [expected if is_new else None]
