"""Measures forwards of one engine in this process: each attention path, eager and captured, against a bound.

The bound is the decoder's linear layers alone, in the same process: reading every weight once, at the speed
that the device's matrix products really reach. A plain copy is measured, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import inputs_of, run_linears, wait_for
from specray.bench.gpu.verifies import measure_verifies, verify_step
from specray.config import EngineConfig
from specray.engine.attention.paged import PagedAttention
from specray.engine.attention.select import Model, choose_backend
from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.linear import Weights
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.cuda_graphs import Capture, CudaCapture, GraphedForward, run_again
from specray.engine.runner.runner import ModelRunner
from specray.engine.step import ForwardOutput
from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Times of one attention path and width: medians, in milliseconds, from the call to the logits."""

    attention: str
    is_captured: bool
    num_sequences: int
    width: int
    """Rows per sequence."""
    forward_ms: float
    bound_ms: float
    """Milliseconds of the linear layers alone, on as many rows."""

    @property
    def share(self) -> float:
        return self.bound_ms / self.forward_ms


@dataclass(frozen=True, slots=True)
class ForwardLoad:
    """Sizes and repetitions to measure."""

    batches: tuple[int, ...] = (1, 4, 16)
    widths: tuple[int, ...] = (1, 2, 4, 6, 8)
    verified: tuple[int, ...] = (1, 8, 32)
    """Sequences of the steps that are verified."""
    context_len: int = 256
    num_repeats: int = 20
    copied_bytes: int = 2**31


TINY = ForwardLoad(
    batches=(1, 2), widths=(1, 3), verified=(2,), context_len=24, num_repeats=2, copied_bytes=2**22
)


def measure(config: EngineConfig, workload: ForwardLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form.

    Raises:
        ConfigError: the model cannot be loaded, or its forward is not the decoder.
    """
    runner = build_runner(config, role="target")
    forward = runner.forward
    if not isinstance(forward, DecoderForward) or not isinstance(forward.attention, PagedAttention):
        raise ConfigError(
            f"the forward of {runner.info.model_name} attends in its own way; nothing to capture"
        )
    if any(layer.routed is not None for layer in forward.layers):
        raise ConfigError(f"{runner.info.model_name} has experts: its linear layers alone are no bound")
    bounds = bounds_ms(forward, runner, workload)
    weight_bytes = sum(x.num_bytes for x in forward.linears())
    used: dict[str, str] = {}
    times: list[ForwardTime] = []
    for name in ("auto", "varlen", "triton", "gather"):
        try:
            attention = _attention(name, forward.attention, runner)
        except ConfigError as error:
            used[name] = str(error)
            continue
        used[name] = "measured"
        other = replace(forward, attention=attention)
        times += _measure_backend(name, other, runner, workload, bounds)
    verify_steps = [
        verify_step(count, workload.context_len, runner.info.block_size) for count in workload.verified
    ]
    return {
        "weight_bytes": weight_bytes,
        "copy_gb_per_s": _copy_gb_per_s(runner.info.device, workload),
        "weights_gb_per_s": weight_bytes / bounds[1] / 1e6,
        "block_size": runner.info.block_size,
        "default_attention": runner.info.attention,
        "attentions": used,
        "times": [{**asdict(entry), "share": entry.share} for entry in times],
        "verifies": measure_verifies(
            runner, verify_steps, num_repeats=workload.num_repeats, is_tiny=workload is TINY
        ),
    }


def _attention(name: str, attention: PagedAttention, runner: ModelRunner) -> PagedAttention:
    info = runner.info
    model = Model(attention.shape, info.dtype, info.device)
    backend = choose_backend(name, model, info.block_size)
    return replace(attention, attend_paged=backend.attend, store=backend.store)


def _measure_backend(
    name: str, forward: DecoderForward, runner: ModelRunner, workload: ForwardLoad, bounds: dict[int, float]
) -> list[ForwardTime]:
    graphs = GraphedForward(
        forward,
        runner.cache,
        max_model_len=runner.info.max_model_len,
        capture=_capture(runner.info.device),
    )
    times = []
    for is_captured in (False, True):
        own = ModelRunner(forward, runner.cache, runner.info, graphs=graphs if is_captured else None)
        for batch in workload.batches:
            for width in workload.widths:
                step = _step(runner, batch, width, workload.context_len)
                forward_ms = _median_ms(partial(own.run, step), runner.info.device, workload.num_repeats)
                bound_ms = bounds[batch * width]
                times.append(ForwardTime(name, is_captured, batch, width, forward_ms, bound_ms))
    return times


def _step(runner: ModelRunner, batch: int, width: int, context_len: int) -> list[SequenceInput]:
    num_blocks = -(-(context_len + width) // runner.info.block_size)
    if batch * num_blocks > runner.info.num_blocks:
        raise ConfigError(
            f"{batch} sequences need {batch * num_blocks} blocks; room: {runner.info.num_blocks}"
        )
    tables = [range(i * num_blocks, (i + 1) * num_blocks) for i in range(batch)]
    return [SequenceInput([2] * width, context_len, table, width) for table in tables]


def _capture(device: torch.device) -> Capture:
    return CudaCapture(device) if device.type == "cuda" else run_again


@torch.inference_mode()
def bounds_ms(forward: DecoderForward, runner: ModelRunner, workload: ForwardLoad) -> dict[int, float]:
    """Times the linear layers alone, by rows of a step; captured where forwards are."""
    linears: list[Weights] = forward.linears()
    device, bounds = runner.info.device, {}
    for num_rows in sorted({1, *(b * w for b in workload.batches for w in workload.widths)}):
        inputs = inputs_of(linears, num_rows, runner.info)

        def work(inputs: list[torch.Tensor] = inputs) -> ForwardOutput:
            return ForwardOutput(run_linears(linears, inputs))

        bounds[num_rows] = _median_ms(_capture(device)(work), device, workload.num_repeats)
    return bounds


def _copy_gb_per_s(device: torch.device, workload: ForwardLoad) -> float:
    """Speed in 10^9 bytes/s at which a copy reads and writes, both counted."""
    source = torch.ones(workload.copied_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    ms = _median_ms(lambda: destination.copy_(source), device, workload.num_repeats)
    return 2 * workload.copied_bytes / ms / 1e6


def _median_ms(call: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    return medians_ms([call], num_repeats, num_warmup=3, wait=wait_for(device))[0]
