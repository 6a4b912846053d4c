"""Hands each step's attention to the kernel that was fastest for its shape when the engine started.

Which kernel is fastest depends on how many sequences and rows there are to fill a device with, and on the
device; rules of thumb are wrong by factors. So the kernels that give the right numbers are timed on a few
shapes, captured as forwards are, and a step goes to the one that won the smallest shape that holds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from specray.engine.attention.packed import BatchShape, DeviceBatch, HostBatch
from specray.engine.attention.paged import AttendPaged
from specray.engine.step import HeadShape, PagedBatch, SequenceRows

_log = logging.getLogger(__name__)

SEQUENCES = (1, 4, 16)
WIDTHS = (1, 4, 8, 32)
CONTEXT_LEN = 2048
"""Tokens of a sequence while kernels are timed, at most."""
LIMIT_S = 20.0
"""Seconds after which no further shape is timed; most of them go into compiling."""
_RUNS_PER_CAPTURE = 10
_REPLAYS = 5

Timer = Callable[[Callable[[], object]], float]
"""Function that returns the seconds that some work takes on the device."""


class StepShape(NamedTuple):
    """Size of a step."""

    num_sequences: int
    max_rows: int
    """Most rows of one sequence."""


class AttendKernel(NamedTuple):
    """A way to attend."""

    name: str
    attend: AttendPaged


class AttendInputs(NamedTuple):
    """What attention is timed with."""

    query: torch.Tensor
    layer: torch.Tensor
    batch: PagedBatch
    block_size: int
    scale: float


class MeasuredAttend:
    """Implements ``paged.AttendPaged``.

    Args:
        default: attends in steps that are larger than every shape that was timed.
        fastest: the winner, by shape.
    """

    def __init__(self, default: AttendKernel, fastest: Mapping[StepShape, AttendKernel]) -> None:
        self.default = default
        self.fastest = dict(sorted(fastest.items()))

    def kernel_for(self, shape: StepShape) -> AttendKernel:
        """The winner of the smallest shape that holds a step."""
        holding = [
            measured
            for measured in self.fastest
            if measured.num_sequences >= shape.num_sequences and measured.max_rows >= shape.max_rows
        ]
        return self.fastest[holding[0]] if holding else self.default

    def __call__(
        self,
        query: torch.Tensor,
        layer: torch.Tensor,
        batch: PagedBatch,
        *,
        block_size: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel = self.kernel_for(StepShape(batch.lengths.shape[0], batch.max_rows))
        return kernel.attend(
            query, layer, batch, block_size=block_size, scale=scale, window=window, sinks=sinks
        )


@torch.inference_mode()
def measure(
    kernels: Sequence[AttendKernel],
    make_inputs: Callable[[StepShape], AttendInputs],
    timer: Timer,
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> MeasuredAttend:
    """Times every kernel on every shape, small ones first, as far as the time goes.

    Args:
        kernels: the first is for steps larger than what was timed, and wins where none is faster.
        make_inputs: what a shape is timed with.
    """
    ends_at = clock() + limit_s
    fastest: dict[StepShape, AttendKernel] = {}
    for shape in [StepShape(count, width) for count in SEQUENCES for width in WIDTHS]:
        if clock() >= ends_at:
            _log.info("attention of %s and more was not timed: %.0f s were over", shape, limit_s)
            break
        inputs = make_inputs(shape)
        times = [timer(_work(kernel, inputs)) for kernel in kernels]
        fastest[shape] = kernels[times.index(min(times))]
        listed = ", ".join(f"{k.name} {1e6 * t:.0f} us" for k, t in zip(kernels, times, strict=True))
        _log.info("attention of %d sequences with %d rows: %s", *shape, listed)
    return MeasuredAttend(kernels[0], fastest)


def _work(kernel: AttendKernel, inputs: AttendInputs) -> Callable[[], object]:
    query, layer, batch, block_size, scale = inputs
    return lambda: kernel.attend(query, layer, batch, block_size=block_size, scale=scale, window=None)


class InputMaker:
    """Makes what attention of one model is timed with.

    Args:
        max_model_len: most tokens of a sequence: block tables are as long, as those of captured forwards are.
    """

    def __init__(
        self, heads: HeadShape, dtype: torch.dtype, device: torch.device, block_size: int, max_model_len: int
    ) -> None:
        self._heads = heads
        self._block_size = block_size
        self._max_num_blocks = -(-max_model_len // block_size)
        self._context_len = min(CONTEXT_LEN, max_model_len)
        per_sequence = -(-self._context_len // block_size)
        self._tables = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(SEQUENCES[-1])]
        num_slots = SEQUENCES[-1] * per_sequence * block_size
        self._layer = torch.randn(
            num_slots, 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device
        )

    def __call__(self, shape: StepShape) -> AttendInputs:
        """What a shape is timed with; as long a context for each sequence."""
        count, width = shape.num_sequences, min(shape.max_rows, self._context_len)
        batch_shape = BatchShape(count, count * width, self._max_num_blocks, width)
        host = HostBatch(batch_shape, block_size=self._block_size, spare_slot=0)
        rows = [
            SequenceRows(index * width, width, self._context_len - width, table)
            for index, table in enumerate(self._tables[:count])
        ]
        host.fill(rows, [0] * (count * width))
        on_device = DeviceBatch(batch_shape, self._layer.device)
        on_device.load(host)
        query = torch.randn(
            count * width,
            self._heads.num_heads,
            self._heads.head_dim,
            dtype=self._layer.dtype,
            device=self._layer.device,
        )
        return AttendInputs(query, self._layer, on_device.batch(), self._block_size, self._heads.scale)


class CudaTimer:
    """A :data:`Timer` of captured work: what the host does between two kernels does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], object]) -> float:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # The first run compiles.
            work()
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_RUNS_PER_CAPTURE):
                work()
        graph.replay()
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        began.record()
        for _ in range(_REPLAYS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize(self._device)
        return float(began.elapsed_time(ended)) / 1e3 / (_REPLAYS * _RUNS_PER_CAPTURE)
