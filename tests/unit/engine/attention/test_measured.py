"""Steps go to the kernel that was fastest for the smallest measured shape that holds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specray.engine.attention import select
from specray.engine.attention.measured import (
    SEQUENCES,
    WIDTHS,
    AttendInputs,
    AttendKernel,
    InputMaker,
    MeasuredAttend,
    StepShape,
    measure,
)
from specray.engine.attention.packed import make_batch
from specray.engine.attention.paged import attend_gathered, store_rows
from specray.engine.attention.select import Backend, Model
from specray.engine.step import HeadShape, SequenceRows

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 8)


class Named:
    """Attends like ``gather`` and notes that it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name = name
        self.asked = asked

    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.asked.append(self.name)
        return attend_gathered(*arguments, **options)


def kernels() -> tuple[list[str], list[AttendKernel]]:
    asked: list[str] = []
    return asked, [AttendKernel(name, Named(name, asked)) for name in ("first", "second")]


def maker(max_model_len: int = 60) -> InputMaker:
    return InputMaker(HEADS, torch.float32, CPU, 16, max_model_len)


def times_of(asked: list[str], seconds: dict[str, list[float]]) -> Callable[[Callable[[], object]], float]:
    """A timer that runs the work once and gives its kernel's next time."""
    iterators = {name: iter(own) for name, own in seconds.items()}

    def timer(work: Callable[[], object]) -> float:
        work()
        return next(iterators[asked[-1]])

    return timer


def test_the_fastest_kernel_wins_each_shape_and_the_first_one_all_ties() -> None:
    asked, both = kernels()
    slow = list(itertools.chain([1.0, 2.0, 3.0, 3.0], itertools.repeat(5.0, 8)))
    timer = times_of(asked, {"first": slow, "second": [2.0, 1.0, 3.0, 2.9, *[4.0] * 8]})
    attend = measure(both, maker(), timer, limit_s=1.0, clock=lambda: 0.0)
    winners = [attend.fastest[StepShape(1, width)].name for width in WIDTHS]
    assert winners == ["first", "second", "first", "second"]
    assert {attend.fastest[StepShape(count, 1)].name for count in SEQUENCES[1:]} == {"second"}
    assert len(attend.fastest) == len(SEQUENCES) * len(WIDTHS)


@pytest.mark.parametrize(
    ("shape", "winner"),
    [
        ((1, 1), "a"),
        ((1, 2), "b"),
        ((1, 4), "b"),
        ((2, 1), "c"),
        ((4, 1), "c"),
        ((3, 2), "d"),
        ((4, 4), "d"),
        ((1, 5), "default"),
        ((5, 1), "default"),
    ],
)
def test_a_step_takes_the_smallest_shape_that_holds_it(shape: tuple[int, int], winner: str) -> None:
    sizes = {"d": (4, 4), "c": (4, 1), "b": (1, 4), "a": (1, 1)}
    fastest = {StepShape(*size): AttendKernel(name, attend_gathered) for name, size in sizes.items()}
    attend = MeasuredAttend(AttendKernel("default", attend_gathered), fastest)
    assert attend.kernel_for(StepShape(*shape)).name == winner


def test_a_step_is_handed_on_as_it_is() -> None:
    asked, (first, second) = kernels()
    attend = MeasuredAttend(first, {StepShape(2, 3): second})
    for rows, name in (
        ((SequenceRows(0, 3, 5, [2, 0]), SequenceRows(3, 1, 0, [1])), "second"),
        ((SequenceRows(0, 4, 5, [2, 0]),), "first"),
    ):
        batch = make_batch(rows, 16, CPU)
        query, layer = torch.randn(4, 4, 8), torch.randn(48, 4, 8)
        options: dict[str, Any] = {"block_size": 16, "scale": 0.3, "window": 5}
        output = attend(query, layer, batch, **options)
        assert asked.pop() == name
        assert torch.equal(output, attend_gathered(query, layer, batch, **options))


def test_measuring_ends_with_its_time_and_what_was_not_measured_stays_with_the_first() -> None:
    asked, both = kernels()
    now = itertools.count()
    timer = times_of(asked, {"first": [2.0] * 9, "second": [1.0] * 9})
    # The clock is read once for the end and once before each shape: at 1, 2, 3, and at 4 it is over.
    attend = measure(both, maker(), timer, limit_s=4.0, clock=lambda: float(next(now)))
    assert list(attend.fastest) == [StepShape(1, width) for width in WIDTHS[:3]]
    assert attend.kernel_for(StepShape(1, 32)).name == "first"
    assert len(asked) == 6


def test_inputs_are_those_of_captured_forwards() -> None:
    """Tables of the longest sequence, contexts of a usual one, and blocks of each sequence's own."""
    inputs: AttendInputs = maker(max_model_len=100)(StepShape(4, 8))
    assert inputs.batch.block_tables.shape == (4, 7)
    assert inputs.batch.lengths.tolist() == [100] * 4
    assert inputs.batch.positions.tolist() == [*range(92, 100)] * 4
    assert (inputs.batch.max_rows, inputs.batch.has_masks) == (8, False)
    assert len(inputs.batch.block_tables.unique()) == 4 * 7
    longer = maker(max_model_len=5000)(StepShape(1, 32))
    assert longer.batch.block_tables.shape == (1, 313) and longer.batch.lengths.tolist() == [2048]
    shorter = maker(max_model_len=20)(StepShape(1, 32))
    assert shorter.batch.positions.tolist() == [*range(20)]


def test_auto_alone_measures_and_a_failure_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, (first, second) = kernels()
    backend = Backend("varlen", first.attend, store_rows, 16, (second,))
    monkeypatch.setattr(select, "make_backend", lambda name, model, block_size: backend)
    timed: list[torch.device] = []

    def make_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
        timed.append(device)
        return times_of(asked, {"first": [2.0] * 12, "second": [1.0] * 12})

    monkeypatch.setattr(select, "CudaTimer", make_timer)
    model = Model(HEADS, torch.float32, CPU, 60)
    assert select.choose_backend("varlen", model, 16) is backend and not timed
    chosen = select.choose_backend("auto", model, 16)
    assert isinstance(chosen.attend, MeasuredAttend) and timed == [CPU]
    assert chosen.attend.kernel_for(StepShape(1, 1)).name == "second"
    assert replace(chosen, attend=backend.attend) == backend

    def fail(device: torch.device) -> None:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(select, "CudaTimer", fail)
    assert select.choose_backend("auto", model, 16) is backend
