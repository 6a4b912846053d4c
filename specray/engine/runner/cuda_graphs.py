"""Forwards of a fixed shape, captured once and replayed: at few rows a GPU is faster than its host.

A step's sequences and its widest one are rounded up to the sizes of a *bucket*. Each bucket has its own
tensors, at fixed places, that describe the step, and a capture of the whole forward that reads them; a replay
is one copy to the device and one launch. Rows that round up belong to nobody: their K/V go to a spare block.
All buckets write their logits to one place, since a tensor that a capture gives is never given back.
Steps beyond the buckets, such as prompts, run as they are.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch

from specray.engine.attention.packed import BatchShape, DeviceBatch, HostBatch
from specray.engine.cache.blocks import BlockCache
from specray.engine.inputs import SequenceInput
from specray.engine.step import AttentionStep, Forward, ForwardOutput, SequenceRows, Step

_log = logging.getLogger(__name__)

Work = Callable[[], ForwardOutput]
Output = TypeVar("Output")


class Capture(Protocol):
    """Captures some work."""

    def __call__(self, work: Callable[[], Output], /) -> Callable[[], Output]:
        """Returns a function that runs the work again, into the same tensors."""
        ...


SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 72)
"""Rows of a sequence; the largest tree and what its sequence lacks before it fit the last."""
MAX_ROWS = 512
"""Rows of a bucket, at most; a longer forward hides its launches."""
_WARM_UPS = 2
"""Runs before a capture; the first one makes compilers, handles and workspaces."""


class Bucket(NamedTuple):
    """A shape for which a forward is captured."""

    num_sequences: int
    width: int
    """Most rows of each sequence."""
    has_masks: bool


def bucket_for(inputs: Sequence[SequenceInput]) -> Bucket | None:
    """The smallest bucket that holds a step; None: it is beyond them."""
    sequences = bisect.bisect_left(SEQUENCES, len(inputs))
    width = bisect.bisect_left(WIDTHS, max(len(item.token_ids) for item in inputs))
    if sequences == len(SEQUENCES) or width == len(WIDTHS):
        return None
    if SEQUENCES[sequences] * WIDTHS[width] > MAX_ROWS:
        return None
    return Bucket(SEQUENCES[sequences], WIDTHS[width], any(item.visibility for item in inputs))


def run_again(work: Callable[[], Output]) -> Callable[[], Output]:
    """A :class:`Capture` for devices that have none: the work itself."""
    return work


class CudaCapture:
    """A :class:`Capture` into CUDA graphs that share their memory; for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], Output]) -> Callable[[], Output]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()

        def replay() -> Output:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class _Prepared:
    host: HostBatch
    on_device: DeviceBatch
    run: Work
    is_captured: bool


class GraphedForward:
    """Runs steps through captured forwards. Not for two threads at once.

    Args:
        forward: whose attention reads ``AttentionStep.batch``.
        cache: with one block more than sequences use, its last, for rows that belong to nobody.
        max_model_len: most tokens of a sequence.
        capture: how forwards are captured.
    """

    def __init__(self, forward: Forward, cache: BlockCache, *, max_model_len: int, capture: Capture) -> None:
        self._forward = forward
        self._cache = cache
        self._max_num_blocks = -(-max_model_len // cache.block_size)
        self._states = cache.states
        self.capture = capture
        self._prepared: dict[Bucket, _Prepared] = {}
        self._logits: torch.Tensor | None = None  # [MAX_ROWS, vocab_size], of whichever bucket ran last

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket, prepared in self._prepared.items() if prepared.is_captured)

    def bucket_for(self, inputs: Sequence[SequenceInput]) -> Bucket | None:
        """The bucket that holds a step; None: it is beyond them, or branches lie beyond the longest table, or
        rows go into the states of recurrent layers at once, as those of prompts do."""
        if max(item.end for item in inputs) > self._max_num_blocks * self._cache.block_size:
            return None
        if self._states is not None and any(item.num_open < len(item.token_ids) for item in inputs):
            return None
        return bucket_for(inputs)

    @torch.inference_mode()
    def prepare(self, buckets: Sequence[Bucket], goes_on: Callable[[], bool] = lambda: True) -> None:
        """Captures ahead of need.

        Args:
            goes_on: asked before each bucket; False: the others are captured when they are needed.
        """
        began = time.perf_counter()
        for bucket in buckets:
            if not goes_on():
                break
            self._get(bucket)
        _log.info("%d forwards captured in %.1f s", len(self.buckets), time.perf_counter() - began)

    def run(self, bucket: Bucket, rows: Sequence[SequenceRows], token_ids: Sequence[int]) -> ForwardOutput:
        """Runs a step.

        Args:
            bucket: what ``bucket_for`` gave for the step.
            rows: of each sequence.
            token_ids: of all rows.

        Returns:
            Logits and features of every row; the next step overwrites them, whatever its bucket.
        """
        prepared = self._get(bucket)
        states = () if self._states is None else self._states.begin_open(rows)
        prepared.host.fill(rows, token_ids, states=states)
        prepared.on_device.load(prepared.host)
        logits, features = prepared.run()
        if self._states is not None:
            self._states.finish(rows)
        if features is not None:
            features = {layer: rows[: len(token_ids)] for layer, rows in features.items()}
        return ForwardOutput(logits[: len(token_ids)], features)

    def _get(self, bucket: Bucket) -> _Prepared:
        prepared = self._prepared.get(bucket)
        if prepared is None:
            prepared = self._prepared[bucket] = self._make(bucket)
        return prepared

    def _make(self, bucket: Bucket) -> _Prepared:
        cache, num_sequences = self._cache, bucket.num_sequences
        shape = BatchShape(
            num_sequences=num_sequences,
            num_rows=num_sequences * bucket.width,
            max_num_blocks=self._max_num_blocks,
            max_rows=bucket.width,
            has_masks=bucket.has_masks,
            has_states=self._states is not None,
        )
        spare_slot = (cache.num_blocks - 1) * cache.block_size
        host = HostBatch(shape, block_size=cache.block_size, spare_slot=spare_slot)
        on_device = DeviceBatch(shape, cache.layers[0].device)

        def forward(out: torch.Tensor | None) -> ForwardOutput:
            batch = on_device.batch()
            attention = AttentionStep((), cache, batch)
            return self._forward(Step(on_device.token_ids, batch.positions, attention, None, out))

        # Nothing but padding: what runs before and during the capture writes to the spare block only.
        host.fill((), ())
        on_device.load(host)
        if self._logits is None:
            # Before any capture, whose memory it must not be: a first forward shows how wide logits are.
            logits = forward(None).logits
            self._logits = logits.new_empty(MAX_ROWS, logits.shape[1])
        kept = self._logits[: shape.num_rows]

        def work() -> ForwardOutput:
            output = forward(kept)
            return output if output.logits is kept else output._replace(logits=kept.copy_(output.logits))

        try:
            return _Prepared(host, on_device, self.capture(work), is_captured=True)
        except RuntimeError as error:
            # torch's allocator has a type of its own for it; the driver, which keeps every graph, has not.
            if "out of memory" not in str(error):
                raise
            # Tried again, it would fail again, at every step of this bucket.
            _log.warning("forwards of %s run as they are: no memory to capture them: %s", bucket, error)
        return _Prepared(host, on_device, work, is_captured=False)
