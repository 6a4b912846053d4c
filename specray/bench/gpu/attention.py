"""Measures attention alone: each kernel on chains and trees, captured, against reading K/V once.

Every kernel is first compared with torch's operators. Those that give other numbers are named and not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specray.engine.attention.measured import AttendKernel, CudaTimer, MeasuredAttend, Timer
from specray.engine.attention.packed import make_batch
from specray.engine.attention.select import VARLEN_BLOCK_SIZE, Model, choose_backend
from specray.engine.step import HeadShape, PagedBatch, SequenceRows
from specray.engine.visibility import tree_visibility
from specray.errors import ConfigError

KERNELS = ("varlen", "triton", "gather")


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Time of one kernel in one layer."""

    kernel: str
    num_sequences: int
    num_rows: int
    """Rows of each sequence."""
    context_len: int
    is_tree: bool
    us: float
    bound_us: float
    """Microseconds in which a copy on this device moves as many bytes as the sequences' K/V have."""


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Sizes to measure."""

    heads: HeadShape = field(default_factory=lambda: HeadShape(32, 8, 128))
    batches: tuple[int, ...] = (1, 4, 16)
    widths: tuple[int, ...] = (1, 5, 9)
    context_lens: tuple[int, ...] = (512, 4096, 32_768)
    num_nodes: int = 64
    max_num_tokens: int = 160_000
    """Tokens of all sequences together, at most."""
    copied_bytes: int = 2**30


TINY = AttentionLoad(HeadShape(4, 2, 16), (1, 2), (1, 3), (40,), 7, copied_bytes=2**20)


def measure(device: torch.device, workload: AttentionLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    timer: Timer = CudaTimer(device) if device.type == "cuda" else _wall_clock
    bytes_per_s = _copied_bytes_per_s(device, timer, workload)
    model = Model(workload.heads, dtype, device, max(workload.context_lens))
    kernels, states = _kernels(model)
    times = []
    for context_len in workload.context_lens:
        for count in workload.batches:
            if count * context_len > workload.max_num_tokens:
                continue
            for width, is_tree in [*((w, False) for w in workload.widths), (workload.num_nodes, True)]:
                inputs = _inputs(model, count, width, context_len, is_tree)
                num_bytes = 2 * count * context_len * workload.heads.num_kv_heads * workload.heads.head_dim
                bound_us = 1e6 * num_bytes * dtype.itemsize / bytes_per_s
                for kernel in kernels:
                    us = 1e6 * timer(_work(kernel, inputs, workload.heads.scale))
                    row = (kernel.name, count, width, context_len, is_tree, us, bound_us)
                    times.append(AttentionTime(*row))
    return {
        "heads": asdict(workload.heads),
        "kernels": states,
        "chosen": _chosen(model),
        "times": [asdict(entry) for entry in times],
    }


def _kernels(model: Model) -> tuple[list[AttendKernel], dict[str, str]]:
    """Kernels that work here, over blocks of one size; and what became of each."""
    kernels, states = [], {}
    for name in KERNELS:
        try:
            backend = choose_backend(name, model, VARLEN_BLOCK_SIZE)
        except ConfigError as error:
            states[name] = str(error)
            continue
        states[name] = "equal"
        kernels.append(AttendKernel(name, backend.attend))
        if name == "triton":
            kernels += backend.rivals
    return kernels, states


def _chosen(model: Model) -> dict[str, str]:
    """The kernel that an engine would take, by shape of a step."""
    attend = choose_backend("auto", model, VARLEN_BLOCK_SIZE).attend if model.device.type == "cuda" else None
    if not isinstance(attend, MeasuredAttend):
        return {}
    return {
        f"{shape.num_sequences} x {shape.max_rows}": kernel.name for shape, kernel in attend.fastest.items()
    }


def _inputs(
    model: Model, count: int, width: int, context_len: int, is_tree: bool
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    per_sequence = -(-(context_len + width) // VARLEN_BLOCK_SIZE)
    # A tree of pairs: its nodes have two children each.
    visibility = tree_visibility(context_len, [(node - 2) // 2 if node > 1 else -1 for node in range(width)])
    rows = [
        SequenceRows(
            index * width,
            width,
            context_len,
            range(index * per_sequence, (index + 1) * per_sequence),
            visibility if is_tree else (),
        )
        for index in range(count)
    ]
    shape = model.shape
    query, layer = (
        torch.randn(size, dtype=model.dtype, device=model.device)
        for size in (
            (count * width, shape.num_heads, shape.head_dim),
            (count * per_sequence * VARLEN_BLOCK_SIZE, 2 * shape.num_kv_heads, shape.head_dim),
        )
    )
    return query, layer, make_batch(rows, VARLEN_BLOCK_SIZE, model.device)


def _work(
    kernel: AttendKernel, inputs: tuple[torch.Tensor, torch.Tensor, PagedBatch], scale: float
) -> Callable[[], object]:
    return lambda: kernel.attend(*inputs, block_size=VARLEN_BLOCK_SIZE, scale=scale, window=None)


def _copied_bytes_per_s(device: torch.device, timer: Timer, workload: AttentionLoad) -> float:
    source = torch.ones(workload.copied_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * workload.copied_bytes / timer(lambda: destination.copy_(source))


def _wall_clock(work: Callable[[], object]) -> float:
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
