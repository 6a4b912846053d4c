"""Experts in CPU kernels: all that are hit in one job, in every format of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cpu.experts.choose import Choice, choose
from specray.engine.cpu.experts.grouped import KernelExperts
from specray.engine.cpu.gemm.linear import can_tile
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.layers.experts.config import Groups, Routing, Score
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.linear import Gate, Linear, PlainLinear
from specray.engine.model.operators import Operators
from specray.engine.model.operators_cpu import KernelOperators, KernelRouter
from specray.engine.model.quantized.cpu import QuantizedKernelOperators, StoredKernelOperators
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.stored_weight import StoredWeight, Weight, numbers_of
from tests.unit.engine.cpu.test_stored import blocks

pytestmark = pytest.mark.skipif(
    not can_tile(torch.empty(32, 32, dtype=torch.bfloat16)), reason="this processor has no kernels for it"
)
CLAMP = Clamp(gain=1.7, limit=0.5)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape: int, seed: int) -> torch.Tensor:
    return random(*shape, seed=seed).mul(float(shape[-1]) ** -0.5).bfloat16()


def both_ways(
    make: Callable[[], Operators], joint: Joint, size: int, hidden: int = 64
) -> tuple[ExpertLayer, ExpertLayer]:
    """Seven experts on kernels, three for each row; sizes that are no whole panels: as one, and in turn."""
    operators = make()
    experts = []
    for n in range(0, 700, 100):
        biases = [weight(size, seed=n + 3 + i) for i in (1, 2)] if isinstance(joint, Clamp) else [None, None]
        gate, up, down = (
            weight(*shape, seed=n + i) for i, shape in enumerate([(size, hidden)] * 2 + [(hidden, size)])
        )
        experts.append(
            ExpertMlp(
                operators.gate(gate, up, *biases, joint), operators.linear(down, weight(hidden, seed=n + 9))
            )
        )
    numbers = random(7, hidden, seed=98)
    # Row by row, so that the choice has the same bits at any number of rows.
    router = Router(
        lambda rows: torch.stack([row.float() @ numbers.T for row in rows]), Routing(3, is_normed=True)
    )
    return operators.experts(router, experts), ExpertLayer(router, ExpertsInTurn(experts))


def quantized(format: Quantization, dtype: torch.dtype, num_threads: int) -> Operators:
    return QuantizedKernelOperators(KernelOperators(dtype, num_threads), format)


MAKERS = {
    "bfloat16": lambda threads: KernelOperators(torch.bfloat16, threads),
    "int8": partial(quantized, Quantization.INT8, torch.bfloat16),
    "int4": partial(quantized, Quantization.INT4, torch.bfloat16),
    "int4 float32": partial(quantized, Quantization.INT4, torch.float32),
}


@pytest.mark.parametrize(
    ("name", "num_threads", "joint", "size"),
    [
        ("bfloat16", 2, Activation.SILU, 96),
        ("bfloat16", 1, CLAMP, 96),
        ("bfloat16", 2, CLAMP, 1056),
        ("int8", 2, Activation.GELU_TANH, 1056),
        ("int4", 1, CLAMP, 96),
        ("int4", 2, Activation.SILU, 1056),
        ("int4 float32", 2, Activation.SILU, 96),
    ],
)
def test_experts_as_one_give_the_bits_of_each_by_itself(
    name: str, num_threads: int, joint: Joint, size: int
) -> None:
    """And a row has the same beside any others: this is what exactness with speculation rests on."""
    grouped, apart = both_ways(partial(MAKERS[name], num_threads), joint, size)
    assert isinstance(grouped.experts, KernelExperts)
    rows = random(150, 64, seed=54).to(torch.float32 if "float32" in name else torch.bfloat16)
    most = grouped(rows)
    for some in (
        *(slice(i, i + 1) for i in (0, 7, 149)),
        slice(2),
        slice(5),
        slice(33),
        slice(64),
        slice(150),
    ):
        given = grouped(rows[some])
        assert torch.equal(given, apart(rows[some])), some
        assert torch.equal(given, most[some]), some


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in (BlockType.Q4_K, BlockType.Q6_K) else pytest.mark.slow)
        for kind in BlockType
    ],
)
def test_experts_in_the_bits_of_a_file(kind: BlockType) -> None:
    operators = StoredKernelOperators(KernelOperators(torch.bfloat16, 2))
    experts = []
    for n in range(4):
        gate, up, down = (StoredWeight((blocks(kind, 256, 256, 3 * n + i),)) for i in range(3))
        experts.append(ExpertMlp(operators.gate(gate, up, None, None), operators.linear(down, None)))
    router = Router(operators.router(weight(4, 256, seed=98), None), Routing(2, is_normed=True))
    grouped = operators.experts(router, experts)
    assert isinstance(grouped.experts, KernelExperts)
    rows = random(20, 256, seed=54).bfloat16()
    for count in (1, 3, 20):
        assert torch.equal(grouped(rows[:count]), ExpertLayer(router, ExpertsInTurn(experts))(rows[:count]))


@pytest.mark.parametrize("chosen", [[[2]] * 40, [[0]], [[i % 5, 5] for i in range(64)]])
def test_one_expert_may_have_all_rows(chosen: list[list[int]]) -> None:
    grouped, apart = both_ways(partial(MAKERS["bfloat16"], 2), Activation.SILU, 1056)
    numbers = torch.tensor(chosen)
    rows, weights = random(len(chosen), 64, seed=55).bfloat16(), random(*numbers.shape, seed=56)
    hits, others = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given = grouped.experts(rows, numbers, weights, hits)
    assert torch.equal(given, apart.experts(rows, numbers, weights, others))
    assert int(hits) == int(others) == len(numbers.unique())


ROUTINGS = {
    "softmax": Routing(3, is_normed=True),
    "softmax of the chosen": Routing(3, chooses_by_product=True),
    "scaled": Routing(1, scale=2.5),
    "sigmoid, bias, groups": Routing(
        4,
        score=Score.SIGMOID,
        choice_bias=(12,),
        groups=Groups(4, 2, 2),
        is_normed=True,
        epsilon=1e-20,
        scale=1.5,
    ),
    "groups by the largest": Routing(2, groups=Groups(3, 1, 1)),
    "floor": Routing(12, is_normed=True, floor=2.0, choice_bias=(12,)),
    "sigmoid of the chosen, rounded": Routing(
        5, score=Score.SIGMOID, chooses_by_product=True, choice_bias=(12,), is_normed=True, is_rounded=True
    ),
}


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_kernel_chooses_as_the_router_does(name: str, is_wide: bool) -> None:
    routing = replace(ROUTINGS[name], is_wide=is_wide)
    linear = random(12, 64, seed=1).bfloat16()
    # Two rows of the router are equal: the lower expert comes first.
    linear[7] = linear[2]
    bias = random(12, seed=2) if routing.choice_bias else None
    made = KernelOperators(torch.bfloat16, 1).router(linear.float() if is_wide else linear, None)
    router = Router(made, routing, bias)
    kernel = KernelRouter.of(router, ThreadPool(1), torch.bfloat16)
    assert kernel is not None
    rows = random(40, 64, seed=3).bfloat16()
    (chosen, weights), (expected, expected_weights) = kernel(rows), router(rows)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(
        weights, expected_weights, atol=1e-6, rtol=5e-3 if routing.is_rounded else 1e-5
    )


def test_numbers_that_are_none_choose_distinct_experts() -> None:
    products = torch.full((2, 6), float("nan"))
    chosen, _ = choose(products, None, Choice(4), ThreadPool(1))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("size", "hidden", "dtype", "joint"),
    [
        (24, 64, torch.bfloat16, Activation.SILU),
        (96, 40, torch.float32, Activation.SILU),
        (24, 40, torch.bfloat16, CLAMP),
    ],
)
def test_sizes_that_fill_no_line(size: int, hidden: int, dtype: torch.dtype, joint: Joint) -> None:
    """What fills them up is zeros: the rest has the bits of each expert by itself, and those of any step."""
    grouped, apart = both_ways(partial(OfType, dtype), joint, size, hidden)
    assert isinstance(grouped.experts, KernelExperts)
    assert grouped.can_be_captured == (hidden % 32 == 0)
    rows = random(40, hidden, seed=54).to(dtype)
    most = grouped(rows)
    assert most.shape == rows.shape and most.is_contiguous()
    assert torch.equal(most, apart(rows))
    for some in (slice(7, 8), slice(5), slice(33)):
        assert torch.equal(grouped(rows[some]), most[some]), some


class OfType(KernelOperators):
    """Those whose weights are numbers of the model's type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, 2)

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        return super().linear(numbers_of(weight, self.dtype).to(self.dtype), bias)

    def gate(self, gate: Weight, up: Weight, *others: Any) -> Gate:
        both = (numbers_of(each, self.dtype).to(self.dtype) for each in (gate, up))
        return super().gate(*both, *others)


def test_experts_in_several_formats_are_one_job_for_each_kind() -> None:
    """Some in codes, in two layouts, and some of plain numbers; gate and down of one expert in two kinds."""
    plain, int4, int8 = (MAKERS["bfloat16"](2), MAKERS["int4"](2), MAKERS["int8"](2))
    experts = []
    for n, (first, second) in enumerate([(int4, int8), (plain, plain), (plain, int4), (int8, plain)]):
        gate, up, down = (
            weight(*shape, seed=10 * n + i) for i, shape in enumerate([(96, 64)] * 2 + [(64, 96)])
        )
        experts.append(ExpertMlp(first.gate(gate, up, None, None), second.linear(down, None)))
    numbers = random(4, 64, seed=98)
    router = Router(lambda rows: torch.stack([row.float() @ numbers.T for row in rows]), Routing(2))
    grouped, apart = plain.experts(router, experts), ExpertLayer(router, ExpertsInTurn(experts))
    assert isinstance(grouped.experts, KernelExperts)
    rows = random(40, 64, seed=54).bfloat16()
    for some in (slice(1), slice(5), slice(40)):
        assert torch.equal(grouped(rows[some]), apart(rows[some]))


def test_layers_of_torch_run_in_turn() -> None:
    operators = KernelOperators(torch.bfloat16, 1)
    gate = operators.gate(weight(24, 32, seed=1), weight(24, 32, seed=2), None, None)
    plain = PlainLinear(weight(32, 24, seed=3), None)
    router = Router(operators.router(weight(2, 32, seed=4), None), Routing(1, is_normed=True))
    assert isinstance(operators.experts(router, [ExpertMlp(gate, plain)] * 2).experts, ExpertsInTurn)
