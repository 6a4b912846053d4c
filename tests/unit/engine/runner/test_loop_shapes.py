"""Which proposals are captured at the start, and which of them a proposal then takes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specray.engine.cache.blocks import BlockCache
from specray.engine.runner.cuda_graphs import Capture, run_again
from specray.engine.runner.draft_loop import (
    LENGTHS,
    DraftLoop,
    LoopAnswer,
    LoopRow,
    LoopShape,
    loop_shapes,
)
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.step import CacheShape, ForwardOutput, SequenceRows, Step
from tests.unit.engine.sampling.device.recording import DEVICE, Recording, Remote

BLOCK_SIZE = 4
TABLE = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class RemoteForward:
    """Logits from a table on the device, by token and position."""

    name = "decoder"
    cache_shape = CacheShape(1, 1, 2)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, step: Step) -> ForwardOutput:
        logits = self._table[(step.token_ids.long() * 7 + step.positions) % len(self._table)]
        return ForwardOutput(logits if step.logit_rows is None else logits[step.logit_rows])


def make_loop(capture: Capture = run_again, *, is_remote: bool = False) -> DraftLoop:
    device = DEVICE if is_remote else torch.device("cpu")
    cache = BlockCache(
        CacheShape(1, 1, 2), num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32, device=device
    )
    return DraftLoop(
        RemoteForward(Remote(TABLE) if is_remote else TABLE),
        cache,
        max_model_len=12,
        kernels=Kernels(),
        capture=capture,
        known=lambda logits: logits,
        max_num_draft_probs=4,
    )


def test_shapes_are_captured_in_their_order_within_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = make_loop()
    now = itertools.count()
    shapes = loop_shapes(8, None)
    # The clock is read once at the begin, then before each shape: 0, 1, 2, 3, 4.
    loop.prepare(shapes, 4.0, clock=lambda: float(next(now)))
    assert loop.shapes == (LoopShape(1, 4), LoopShape(1, 3), LoopShape(1, 5))
    assert caplog.messages == [
        f"3 of {len(shapes)} proposals captured in 5.0 s; "
        "others take larger ones, shorter ones, or single steps"
    ]


def test_captures_end_where_the_memory_does() -> None:
    tried: list[object] = []

    def capture(work: Any) -> Any:
        tried.append(work)
        if len(tried) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work

    loop = make_loop(capture)
    loop.prepare(loop_shapes(1, None), 600.0)
    assert (len(tried), loop.shapes) == (3, (LoopShape(1, 4), LoopShape(1, 3)))


def test_other_failures_of_a_capture_are_none_of_memory() -> None:
    def capture(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        make_loop(capture).prepare([LoopShape(1, 1)], 600.0)


@pytest.mark.parametrize(
    ("num_sequences", "num_tokens", "expected"),
    [(1, 1, (1, 1)), (3, 7, (4, 7)), (3, 9, (4, 8)), (64, 32, (64, 8)), (65, 1, None)],
)
def test_shape_is_the_smallest_that_holds_a_proposal(
    num_sequences: int,
    num_tokens: int,
    expected: tuple[int, int] | None,
) -> None:
    loop = make_loop()
    assert loop.shape_for(1, 1) is None
    loop.prepare(loop_shapes(64, None), 600.0)
    assert loop.shape_for(num_sequences, num_tokens) == (expected and LoopShape(*expected))
    for length, own in ((1, 4), (4, 4), (5, 8), (9, 8)):
        assert loop.shape_for(2, length, cuts=True) == LoopShape(2, own, cuts=True)
        assert loop.shape_for(2, length, truncates=True) == LoopShape(2, own, truncates=True)
        assert loop.shape_for(2, length, cuts=True, truncates=True) == LoopShape(2, own, True, True)


def test_all_shapes_of_a_configuration_are_there_and_the_likeliest_first() -> None:
    shapes = loop_shapes(64, None)
    assert len(shapes) == len(set(shapes)) == 7 * 8 + 3 * 7 * 2
    assert shapes[:8] == [LoopShape(1, length) for length in (4, 3, 5, 2, 6, 1, 8, 7)]
    assert {shape.num_sequences for shape in shapes[:32]} == {1, 2, 4, 8}
    assert shapes[32:34] == [LoopShape(1, 4, cuts=True), LoopShape(1, 8, cuts=True)]
    assert all(shape.num_sequences <= 4 for shape in shapes[32:50])
    assert shapes[50] == LoopShape(16, 4)
    assert {shape.num_tokens for shape in shapes if not any(shape[2:])} == set(LENGTHS) == set(range(1, 9))


@pytest.mark.parametrize(
    ("num_sequences", "num_tokens", "sequences", "lengths", "cut_lengths"),
    [
        (1, 3, {1}, [3, 2, 1], {4}),
        (3, 4, {1, 2, 4}, [4, 3, 2, 1], {4}),
        (4, 5, {1, 2, 4}, [5, 4, 3, 2, 1], {4, 8}),
        (9, 20, {1, 2, 4, 8, 16}, [8, 4, 3, 5, 2, 6, 1, 7], {4, 8}),
        (1000, 1, {1, 2, 4, 8, 16, 32, 64}, [1], {4}),
    ],
)
def test_shapes_are_those_that_a_configuration_allows(
    num_sequences: int, num_tokens: int, sequences: set[int], lengths: list[int], cut_lengths: set[int]
) -> None:
    shapes = loop_shapes(num_sequences, num_tokens)
    plain = [shape for shape in shapes if not any(shape[2:])]
    assert {shape.num_sequences for shape in shapes} == sequences
    assert [shape.num_tokens for shape in plain if shape.num_sequences == 1] == lengths
    assert {shape.num_tokens for shape in shapes if any(shape[2:])} == cut_lengths


@pytest.mark.parametrize("shape", [LoopShape(2, 5), LoopShape(2, 4, True), LoopShape(4, 3, True, True)])
def test_a_proposal_is_copied_in_and_out_once_whatever_its_length(shape: LoopShape) -> None:
    key, settings = (9, 6, 1), (1.0, 5.0, 0.9, -np.inf) if shape.cuts else (1.0, 0.0, 1.0, -np.inf)
    rows = [LoopRow(shape.num_tokens, key, settings, (9, 6, 0) if shape.truncates else None)] * 2
    sequences = [SequenceRows(0, 2, 5, [1, 2, 3]), SequenceRows(2, 1, 6, [4, 5, 6])]

    def answer(recording: Recording | None) -> LoopAnswer:
        loop = make_loop(is_remote=recording is not None)
        # Outside of inference mode, in which the recording would see other operators.
        loop._prepared[shape] = loop._make(shape)
        if recording is not None:
            recording.counts.clear()
        return loop.run(shape, sequences, [3, 4, 5], rows)

    with Recording() as recording:
        remote = answer(recording)
    assert recording.counts == {"in": 2, "out": 1}
    assert remote == answer(None)
    assert len({tuple(tokens) for tokens in remote.token_ids}) > 1
