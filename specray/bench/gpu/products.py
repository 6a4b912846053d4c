"""Measures products with weights in their own bits: the share of the bandwidth by format and rows.

Weights are several copies of one shape, more than a cache holds, and each product reads the next. Every
format is first compared with its values; one that is wrong is named and not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from specray.engine.attention.measured import CudaTimer, Timer
from specray.engine.cuda.tiles import FIXED, FREE
from specray.engine.model.linear import Linear, PlainLinear
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.stored_weight import Part

_HALF_OF_ONE = 0x3800
"""Bits of a float16 number of usual size."""


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Time of one format's product with some rows."""

    format: str
    out_features: int
    in_features: int
    num_rows: int
    us: float
    fixed_us: float
    """Microseconds with the tile that every number of rows has."""
    bound_us: float
    """Microseconds in which a copy on this device moves as many bytes as the weight has."""

    @property
    def share(self) -> float:
        return self.bound_us / self.us


@dataclass(frozen=True, slots=True)
class ProductLoad:
    """Sizes to measure."""

    shapes: tuple[tuple[int, int], ...] = ((6144, 4096), (4096, 14336), (28672, 4096))
    """Output and input features: those of an 8B model."""
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 512)
    weight_bytes: int = 2**28
    """Bytes of the copies that are read in turn, at least."""
    copied_bytes: int = 2**30


TINY = ProductLoad(((64, 256),), (1, 17), 0, 2**20)


def measure(device: torch.device, workload: ProductLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form. Importing the kernels needs triton."""
    from specray.engine.cuda.codes.check import check_product
    from specray.engine.cuda.codes.packed import pack

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    timer: Timer = CudaTimer(device) if device.type == "cuda" else _wall_clock
    bytes_per_s = _copied_bytes_per_s(device, timer, workload)
    states: dict[str, str] = {}
    times = []
    for shape in workload.shapes:
        times += _plain_times(shape, dtype, device, workload, timer, bytes_per_s)
        for name, part in random_parts(*shape).items():
            try:
                packed = pack(part, device)
                check_product(packed, part, dtype, "it", "another")
            # Whatever a compiler or a driver raises: the others are measured all the same.
            except Exception as error:
                lines = str(error).strip().splitlines()
                states[name] = f"{type(error).__name__}: {lines[0] if lines else 'no reason is given'}"
                continue
            states.setdefault(name, "equal")
            times += _times(name, packed, dtype, workload, timer, bytes_per_s)
    return {"formats": states, "times": [{**asdict(each), "share": each.share} for each in times]}


def random_parts(out_features: int, in_features: int) -> Mapping[str, Part]:
    """A weight of every format, of random codes."""
    generator = torch.Generator().manual_seed(0)

    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    parts: dict[str, Part] = {
        kind.value: _blocks(kind, random_bytes, out_features, in_features) for kind in BlockType
    }
    codes = random_bytes(out_features, in_features)
    scales = torch.rand(out_features, in_features // 128, generator=generator).half()
    zeros = (random_bytes(*scales.shape) & 15).to(torch.int8)
    parts["int4 of 128"] = GroupedWeight((codes & 15).to(torch.int8), scales, zeros, 4)
    parts["int8 of 128"] = GroupedWeight(codes.view(torch.int8), scales)
    finite = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)
    parts["fp8 of blocks"] = GroupedWeight(finite, scales)
    parts["fp8 by row"] = GroupedWeight(finite, scales[:, :1].contiguous())
    nvfp4_scales = (random_bytes(out_features, in_features // 16) & 0x3F).view(torch.float8_e4m3fn)
    parts["nvfp4"] = Nvfp4Weight(
        codes[:, : in_features // 2].contiguous(), nvfp4_scales, scales[:, 0].float()
    )
    return parts


def _blocks(
    kind: BlockType, random_bytes: Callable[..., torch.Tensor], out_features: int, in_features: int
) -> BlockWeight:
    size = kind.size
    rows = random_bytes(out_features, in_features // size.num_values, size.num_bytes)
    if kind is BlockType.MXFP4:
        rows[..., 0] = 120 + (rows[..., 0] & 7)
    else:
        half = torch.tensor([_HALF_OF_ONE], dtype=torch.int16).view(torch.uint8)
        place = size.num_bytes - 2 if kind is BlockType.Q6_K else 0
        rows[..., place : place + 2] = half
        if kind in (BlockType.Q4_1, BlockType.Q5_1, BlockType.Q4_K, BlockType.Q5_K):
            rows[..., 2:4] = half
    return BlockWeight(kind, rows.flatten(1))


def _times(
    name: str, packed: Any, dtype: torch.dtype, workload: ProductLoad, timer: Timer, bytes_per_s: float
) -> list[ProductTime]:
    from specray.engine.cuda.linear import ProductLinear

    device, num_bytes = packed.codes.device, packed.num_bytes
    count = max(1, -(-workload.weight_bytes // num_bytes))
    weights = [packed, *(packed.copy() for _ in range(count - 1))]
    found = []
    for num_rows in workload.rows:
        rows = torch.randn(num_rows, packed.in_features, device=device).to(dtype)
        us = []
        for rule in (FREE, FIXED):
            linears = [ProductLinear((weight,), None, dtype, rule) for weight in weights]
            work = partial(_run, linears, rows)
            us.append(1e6 * timer(work) / count)
        shape, bound_us = (packed.size, packed.in_features), 1e6 * num_bytes / bytes_per_s
        found.append(ProductTime(name, *shape, num_rows, us[0], us[1], bound_us))
    return found


def _plain_times(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    workload: ProductLoad,
    timer: Timer,
    bytes_per_s: float,
) -> list[ProductTime]:
    """Times of plain weights: torch's products beside those with one tile."""
    from specray.engine.cuda.epilogue import PlainWeight
    from specray.engine.cuda.linear import ProductLinear

    num_bytes = shape[0] * shape[1] * dtype.itemsize
    count = max(1, -(-workload.weight_bytes // num_bytes))
    weights = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
    plain = [PlainLinear(weight, None) for weight in weights]
    linears = [ProductLinear((PlainWeight(weight),), None, dtype, FIXED) for weight in weights]
    found = []
    for num_rows in workload.rows:
        rows = torch.randn(num_rows, shape[1], device=device).to(dtype)
        us, fixed_us = (1e6 * timer(partial(_run, each, rows)) / count for each in (plain, linears))
        name = str(dtype).removeprefix("torch.")
        found.append(ProductTime(name, *shape, num_rows, us, fixed_us, 1e6 * num_bytes / bytes_per_s))
    return found


def _run(linears: Sequence[Linear], rows: torch.Tensor) -> None:
    for linear in linears:
        linear(rows)


def _copied_bytes_per_s(device: torch.device, timer: Timer, workload: ProductLoad) -> float:
    source = torch.ones(workload.copied_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * workload.copied_bytes / timer(lambda: destination.copy_(source))


def _wall_clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
