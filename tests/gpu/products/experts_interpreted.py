"""Runs experts in codes on CPU, as one and in turn; started by test_products with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cuda.tiles import FIXED
from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.layers.experts.layer import ExpertMlp, ExpertMlps, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.triton import TritonExperts
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.quantized.cuda import CodeOperators
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.reordered_weight import ReorderedWeight
from specray.engine.weights.stored_weight import StoredWeight, Weight
from tests.gpu.products.stored_parts import random_blocks

NUM_EXPERTS = 4
ROWS = (1, 3, 16, 33)
_EDGES = 8
"""Rows of random blocks with the largest numbers, of which products of products are infinite."""


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: BlockType, size: int, columns: int, seed: int) -> Weight:
    return StoredWeight((random_blocks(kind, size + _EDGES, columns, seed).select(slice(_EDGES, None)),))


def int4(size: int, columns: int, seed: int) -> Weight:
    """Of some experts all zero points are in the middle, and of others no scale is one of float16."""
    scales = (random(size, columns // 64, seed=seed) * 0.01).half()
    zeros = torch.full(scales.shape, 8, dtype=torch.int8)
    if seed // 10 % 2:
        zeros = random(*scales.shape, seed=seed).mul(4).clamp(-8, 7).add(8).to(torch.int8)
    numbers = scales.float() * 1.0001 if seed // 10 % 3 else scales
    codes = random(size, columns, seed=seed).mul(4).clamp(-8, 7).add(8).to(torch.int8)
    return StoredWeight((GroupedWeight(codes, numbers, zeros, 4),))


def fp8(size: int, columns: int, seed: int) -> Weight:
    codes = random(size, columns, seed=seed).to(torch.float8_e4m3fn)
    return StoredWeight((GroupedWeight(codes, random(size, columns // 128, seed=seed) * 0.1),))


def nvfp4(size: int, columns: int, seed: int) -> Weight:
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (size, columns // 2), generator=numbers).to(torch.uint8)
    scales = torch.rand(size, columns // 16, generator=numbers).to(torch.float8_e4m3fn)
    return StoredWeight((Nvfp4Weight(codes, scales, torch.rand(size, generator=numbers)),))


def plain(size: int, columns: int, seed: int) -> Weight:
    return random(size, columns, seed=seed) * float(columns) ** -0.5


def q4_k(size: int, columns: int, seed: int) -> Weight:
    return blocks(BlockType.Q4_K, size, columns, seed)


def mxfp4(size: int, columns: int, seed: int) -> Weight:
    return blocks(BlockType.MXFP4, size, columns, seed)


Make = Callable[[int, int, int], Weight]
CLAMP = Clamp(limit=7.0, gain=1.702)
FORMATS: dict[str, tuple[Make, int, Joint, Quantization]] = {
    "q4_k": (q4_k, 256, Activation.SILU, Quantization.NONE),
    "mxfp4": (mxfp4, 192, CLAMP, Quantization.NONE),
    "int4": (int4, 128, Activation.GELU_TANH, Quantization.NONE),
    "fp8": (fp8, 128, Activation.SILU, Quantization.NONE),
    "nvfp4": (nvfp4, 96, Activation.SILU, Quantization.NONE),
    "int8 anew": (plain, 96, CLAMP, Quantization.INT8),
    "int4 anew": (plain, 96, Activation.SILU, Quantization.INT4),
}
"""What makes weights, the size of rows and of what is between, how gate and up join, and the format."""


def mlps(operators: CodeOperators, make: Make, size: int, joint: Joint) -> list[ExpertMlp]:
    experts = []
    for seed in range(0, 10 * NUM_EXPERTS, 10):
        gate, up, down = (make(size, size, seed + part) for part in range(3))
        some = [random(size, seed=seed + part) if isinstance(joint, Clamp) else None for part in range(3)]
        experts.append(
            ExpertMlp(operators.gate(gate, up, some[0], some[1], joint), operators.linear(down, some[2]))
        )
    return experts


def agrees(name: str) -> None:
    """Experts as one give the bits of experts in turn, and a row those that it has in any step.

    With one expert that has all rows, and one that has none.
    """
    make, size, joint, format = FORMATS[name]
    operators = CodeOperators(
        TorchOperators(torch.float32), torch.float32, torch.device("cpu"), format, FIXED
    )
    experts = mlps(operators, make, size, joint)
    layer = operators.experts(Router(torch.nn.Identity(), Routing(2)), experts)
    assert isinstance(layer.experts, TritonExperts) and layer.can_be_captured and layer.experts.is_fixed
    rows, weights = random(max(ROWS), size, seed=1), random(max(ROWS), 2, seed=2)
    spread = torch.tensor([[row % 3, (row + 1 + row % 2) % 3] for row in range(max(ROWS))])
    one = torch.full((max(ROWS), 1), 1)
    in_turn = ExpertsInTurn(experts)
    for chosen in (spread, one):
        own = weights[:, : chosen.shape[1]]
        most = compared(layer.experts, in_turn, rows, chosen, own)
        assert bool(most.isfinite().all()) and float(most.abs().max()) > 0.0
        for count in ROWS[:-1]:
            some = slice(max(ROWS) - count, None)
            assert torch.equal(layer.experts(rows[some], chosen[some], own[some]), most[some]), (name, count)
    compared(layer.experts, in_turn, rows[:3], spread[:3], weights[:3])


def compared(
    grouped: ExpertMlps,
    in_turn: ExpertMlps,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    bits: bool = True,
) -> torch.Tensor:
    hits, others = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given, expected = grouped(rows, chosen, weights, hits), in_turn(rows, chosen, weights, others)
    error = float((given - expected).abs().max() / expected.abs().max())
    assert torch.equal(given, expected) if bits else error < 1e-6, error
    assert int(hits) == int(others) == len(chosen.unique())
    return given


def reordered(size: int, columns: int, seed: int) -> Weight:
    """As GPTQ has them with ``desc_act``: of some experts ranks have groups that fill no unit."""
    codes = random(size, columns, seed=seed).mul(4).clamp(-8, 7).add(8).to(torch.int8)
    weight = GroupedWeight(codes, random(size, columns // 32, seed=seed) * 0.1, None, 4)
    groups = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)) // 32
    return StoredWeight((ReorderedWeight.of(weight, groups),))


def q4_1(size: int, columns: int, seed: int) -> Weight:
    return blocks(BlockType.Q4_1, size, columns, seed)


def others() -> None:
    """Experts of several layouts, with gate and up in two, in orders of their own, and of plain numbers."""
    size, num_rows = 64, 18
    operators = CodeOperators(
        TorchOperators(torch.float32), torch.float32, torch.device("cpu"), Quantization.NONE, FIXED
    )
    router = Router(torch.nn.Identity(), Routing(2))
    first, second, ordered, numbers = (
        mlps(operators, make, size, CLAMP) for make in (q4_1, int4, reordered, plain)
    )
    biases = random(size, seed=4), random(size, seed=5)
    parted = replace(second[3], gate=operators.gate(q4_1(size, size, 1), int4(size, size, 2), *biases, CLAMP))
    rows, weights = random(num_rows, size, seed=1), random(num_rows, 2, seed=2)
    chosen = torch.tensor([[row % 4, (row + 1 + row % 2) % 4] for row in range(num_rows)])
    for experts in (
        [first[0], second[1], second[2], numbers[3]],
        [first[0], parted, first[2], replace(first[3], down=numbers[3].down)],
        ordered,
        [ordered[0], first[1], ordered[2], numbers[3]],
    ):
        layer = operators.experts(router, experts).experts
        assert isinstance(layer, TritonExperts)
        most = compared(layer, ExpertsInTurn(experts), rows, chosen, weights, bits=False)
        for some in (slice(1), slice(3)):
            assert torch.equal(layer(rows[some], chosen[some], weights[some]), most[some])
    assert isinstance(operators.experts(router, [ExpertMlp(len, len)]).experts, ExpertsInTurn)  # type: ignore[arg-type]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:]:
        if part == "others":
            others()
        else:
            agrees(part)
    print("agreed")
