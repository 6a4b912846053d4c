"""Measures the experts of some layers alone, against reading the weights of those that are hit once.

The bound is the speed at which one dense product of one row reads weights in the same process. Beside the
grouped products the same experts are computed one after the other, as without kernels for them, and on a CPU
the same products with the weights of one expert, which stay in its cache. One thread is timed by what it
takes of the processor, so that it may be measured beside other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.layers.experts.layer import ExpertMlp, ExpertMlps, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.linear import Linear
from specray.engine.model.operators import Operators, cpu_operators, cuda_operators
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.runner.cuda_graphs import CudaCapture
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.stored_weight import StoredWeight, Weight

_Make = Callable[[tuple[int, int]], Weight]
"""Makes a weight, ``(out_features, in_features)``."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Sizes to measure."""

    num_layers: int = 2
    num_experts: int = 64
    num_chosen: int = 8
    hidden_size: int = 2048
    intermediate_size: int = 1024
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    num_repeats: int = 15
    num_threads: int = 2
    """Threads on a CPU; with one, times are processor time."""


TINY = ExpertLoad(2, 8, 2, 64, 32, (1, 3), 2, 1)
LARGE = ExpertLoad(4, 128, 8, 2048, 768, num_repeats=50)
"""Layers of Qwen3-30B-A3B."""


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Times of all layers' experts: medians, in milliseconds."""

    format: str
    num_rows: int
    num_hit: float
    """Distinct experts of a layer that the rows hit, on average."""
    ms: float
    in_turn_ms: float
    """Milliseconds of the same experts one after the other."""
    in_cache_ms: float | None
    """Milliseconds of as many experts of the same weights; None: not measured, on a GPU."""
    gb_per_s: float
    """Speed in 10^9 bytes/s at which the weights of the experts that are hit are read."""
    dense_gb_per_s: float
    """That of the dense product, in turns with both."""
    own_gb_per_s: float
    """That of a dense product in the experts' format."""

    @property
    def share(self) -> float:
        return self.gb_per_s / self.dense_gb_per_s


def measure(device: torch.device, workload: ExpertLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form."""
    is_tiny = workload is TINY
    dtype = torch.float32 if is_tiny else torch.bfloat16
    if device.type == "cuda":
        operators = cuda_operators(dtype, device)
    else:
        operators = TorchOperators(dtype) if is_tiny else cpu_operators(dtype, workload.num_threads)
    plain: _Make = partial(torch.full, fill_value=0.01, dtype=dtype, device=device)
    makers = {str(dtype).removeprefix("torch."): (operators, plain)}
    if not is_tiny:
        makers["int4"] = _stored_operators(operators, dtype, device), _nibbles
    dense = _dense(operators, plain, workload)
    times: list[ExpertTime] = []
    for name, (maker, make) in makers.items():
        times += _measure_format(name, make, maker, device, workload, dense)
    return {
        "sizes": asdict(workload),
        "operators": type(operators).__name__,
        "times": [{**asdict(entry), "share": entry.share} for entry in times],
    }


@torch.inference_mode()
def _measure_format(
    name: str,
    make: _Make,
    operators: Operators,
    device: torch.device,
    workload: ExpertLoad,
    dense: Linear,
) -> list[ExpertTime]:
    own_dense = _dense(operators, make, workload)
    experts = [
        [_expert(operators, make, workload) for _ in range(workload.num_experts)]
        for _ in range(workload.num_layers)
    ]
    # It chooses nothing: the choices are given.
    router = Router(torch.nn.Identity(), Routing(workload.num_chosen))
    grouped = [operators.experts(router, each).experts for each in experts]
    in_turn = [ExpertsInTurn(each) for each in experts]
    some = experts[0][0]
    expert_bytes, times = some.gate.num_bytes + some.down.num_bytes, []
    for num_rows in workload.rows:
        rows = torch.randn(num_rows, workload.hidden_size, device=device, dtype=_dtype_of(name))
        chosen = [_choices(num_rows, workload, device, layer) for layer in range(workload.num_layers)]
        weights = torch.full((num_rows, workload.num_chosen), 1 / workload.num_chosen, device=device)
        calls: list[Callable[[], object]] = [
            _work(layers, rows, chosen, weights) for layers in (grouped, in_turn)
        ]
        if all(each.can_be_captured for each in grouped):
            calls[0] = _captured(calls[0], operators, device)
        row = torch.ones(1, workload.hidden_size, device=device, dtype=rows.dtype)
        calls += [partial(dense, row), partial(own_dense, row)]
        if device.type == "cpu":
            cached = [operators.experts(router, [each[0]] * workload.num_experts).experts for each in experts]
            calls.append(_work(cached, rows, chosen, weights))
        is_alone = device.type == "cpu" and workload.num_threads == 1
        clock = time.process_time if is_alone else time.perf_counter
        ms, in_turn_ms, dense_ms, own_ms, *cache_ms = medians_ms(
            calls, workload.num_repeats, num_warmup=2, wait=wait_for(device), clock=clock
        )
        num_hit = sum(len(set(each.flatten().tolist())) for each in chosen)
        speed, dense_speed = num_hit * expert_bytes / ms / 1e6, dense.num_bytes / dense_ms / 1e6
        mean = num_hit / workload.num_layers
        own_speed, in_cache_ms = own_dense.num_bytes / own_ms / 1e6, next(iter(cache_ms), None)
        times.append(
            ExpertTime(name, num_rows, mean, ms, in_turn_ms, in_cache_ms, speed, dense_speed, own_speed)
        )
    return times


def _captured(work: Callable[[], object], operators: Operators, device: torch.device) -> Callable[[], object]:
    if device.type == "cuda":
        return CudaCapture(device)(work)
    from specray.engine.cpu.attention.kernel import attention_kernel
    from specray.engine.cpu.graph import CpuGraph
    from specray.engine.cpu.memory_pool import MemoryPool
    from specray.engine.model.operators_cpu import KernelOperators

    assert isinstance(operators, KernelOperators), "others of a CPU capture nothing"
    pool = operators.thread_pool
    pool.recorder = graph = CpuGraph(pool, attention_kernel(64, "bfloat16"), MemoryPool())
    try:
        work()
    finally:
        pool.recorder = None
    graph.finish()
    return graph.run_again


def _dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "float32" else torch.bfloat16


def _work(
    layers: list[ExpertMlps] | list[ExpertsInTurn],
    rows: torch.Tensor,
    chosen: list[torch.Tensor],
    weights: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        for layer, numbers in zip(layers, chosen, strict=True):
            out = layer(rows, numbers, weights)
        return out

    return work


def _choices(num_rows: int, workload: ExpertLoad, device: torch.device, seed: int) -> torch.Tensor:
    """Independent and uniform, ``[num_rows, num_chosen]``."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(num_rows, workload.num_experts, generator=generator)
    return numbers.argsort(-1)[:, : workload.num_chosen].contiguous().to(device)


def _expert(operators: Operators, make: _Make, workload: ExpertLoad) -> ExpertMlp:
    hidden, inner = workload.hidden_size, workload.intermediate_size
    gate, up, down = make((inner, hidden)), make((inner, hidden)), make((hidden, inner))
    return ExpertMlp(operators.gate(gate, up, None, None), operators.linear(down, None))


def _dense(operators: Operators, make: _Make, workload: ExpertLoad) -> Linear:
    """One linear layer of as many weights as a row's experts of all layers."""
    size = 3 * workload.num_layers * workload.num_chosen * workload.intermediate_size
    return operators.linear(make((size, workload.hidden_size)), None)


def _stored_operators(operators: Operators, dtype: torch.dtype, device: torch.device) -> Operators:
    if device.type == "cuda":
        from specray.engine.model.quantized.cuda import CodeOperators

        return CodeOperators(operators, dtype, device)
    from specray.engine.model.operators_cpu import KernelOperators
    from specray.engine.model.quantized.cpu import StoredKernelOperators

    assert isinstance(operators, KernelOperators), "those of a CPU"
    return StoredKernelOperators(operators)


def _nibbles(shape: tuple[int, int]) -> Weight:
    """Weights in the layout of int4; zeros cost as much as other numbers, and nothing to make."""
    kind = BlockType.Q4_1
    num_bytes = shape[1] // kind.size.num_values * kind.size.num_bytes
    codes = torch.zeros(shape[0], num_bytes, dtype=torch.uint8)
    return StoredWeight((BlockWeight(kind, codes),))
