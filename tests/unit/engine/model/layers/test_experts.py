"""Routed experts: each row has the sum of its own, whatever rows are beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from specray.engine.activation import Clamp
from specray.engine.cpu.gemm.linear import can_tile
from specray.engine.model.layers.expert_config import Routing
from specray.engine.model.layers.experts import (
    ClampedGate,
    ExpertGroup,
    ExpertLayer,
    ExpertMlp,
    Sum,
)
from specray.engine.model.layers.routing import Router
from specray.engine.model.linear import make_gate, make_linear
from specray.engine.model.operators_cpu import KernelOperators

NUM_EXPERTS, HIDDEN, INNER = 5, 16, 24
CLAMP = Clamp(gain=1.7, limit=0.5)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = [
    (
        random(INNER, HIDDEN, seed=3 * n),
        random(INNER, HIDDEN, seed=3 * n + 1),
        random(HIDDEN, INNER, seed=3 * n + 2),
    )
    for n in range(NUM_EXPERTS)
]
ROUTER = random(NUM_EXPERTS, HIDDEN, seed=99)


def layer(num_chosen: int, *, is_normed: bool) -> ExpertLayer:
    experts = [
        ExpertMlp(make_gate(gate, up, None, None), make_linear(down, None)) for gate, up, down in WEIGHTS
    ]
    return ExpertLayer(
        Router(partial(F.linear, weight=ROUTER), Routing(num_chosen, is_normed=is_normed)), experts
    )


@pytest.mark.parametrize("num_chosen", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("is_normed", [False, True])
def test_sum_of_the_chosen_by_their_probabilities(num_chosen: int, is_normed: bool) -> None:
    rows = random(7, HIDDEN, seed=50)
    probabilities = (rows @ ROUTER.T).softmax(-1)
    expected = torch.zeros_like(rows)
    for row in range(len(rows)):
        chosen = probabilities[row].argsort(descending=True)[:num_chosen].tolist()
        total = float(probabilities[row, chosen].sum()) if is_normed else 1.0
        for expert in chosen:
            gate, up, down = WEIGHTS[expert]
            output = down @ (F.silu(gate @ rows[row]) * (up @ rows[row]))
            expected[row] += probabilities[row, expert] / total * output
    torch.testing.assert_close(layer(num_chosen, is_normed=is_normed)(rows), expected, atol=1e-4, rtol=1e-5)


def test_rows_alone_and_among_others() -> None:
    rows, experts = random(9, HIDDEN, seed=51), layer(2, is_normed=True)
    alone = torch.cat([experts(row[None]) for row in rows])
    torch.testing.assert_close(experts(rows), alone, atol=1e-4, rtol=1e-5)


needs_kernels = pytest.mark.skipif(
    not can_tile(torch.empty(32, 32, dtype=torch.bfloat16)), reason="this processor has no kernels for it"
)


def wide_layer(*, is_clamped: bool, num_threads: int) -> ExpertLayer:
    """Seven experts on kernels, three for each row; sizes that are no whole panels."""
    operators = KernelOperators(torch.bfloat16, num_threads)

    def weight(*shape: int, seed: int) -> torch.Tensor:
        return random(*shape, seed=seed).mul(float(shape[-1]) ** -0.5).bfloat16()

    experts = []
    for n in range(0, 700, 100):
        down = operators.linear(weight(64, 96, seed=n), weight(64, seed=n + 1))
        if is_clamped:
            both = operators.linear(weight(192, 64, seed=n + 2), weight(192, seed=n + 3))
            experts.append(ExpertMlp(ClampedGate(both, CLAMP), down))
        else:
            gate = operators.gate(weight(96, 64, seed=n + 2), weight(96, 64, seed=n + 3), None, None)
            experts.append(ExpertMlp(gate, down))
    router = operators.router(weight(7, 64, seed=98), None)
    gates = [each.gate.both if isinstance(each.gate, ClampedGate) else each.gate for each in experts]
    gate_group, down_group = operators.group(gates), operators.group([each.down for each in experts])
    assert gate_group is not None and down_group is not None
    group = ExpertGroup(gate_group, down_group, CLAMP if is_clamped else None)
    return ExpertLayer(Router(router, Routing(3, is_normed=True)), experts, group)


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("is_clamped", [False, True])
def test_experts_as_one_give_the_bits_of_each_by_itself(is_clamped: bool, num_threads: int) -> None:
    """And a row has the same beside any others: this is what exactness with speculation rests on."""
    grouped = wide_layer(is_clamped=is_clamped, num_threads=num_threads)
    apart = replace(grouped, group=None)
    rows = random(150, 64, seed=54).bfloat16()
    alone = torch.cat([grouped(row[None]) for row in rows])
    for num_rows in (1, 2, 5, 33, 150):
        given = grouped(rows[:num_rows])
        assert torch.equal(given, apart(rows[:num_rows])), num_rows
        assert torch.equal(given, alone[:num_rows]), num_rows


@needs_kernels
def test_layers_of_other_kinds_are_no_group() -> None:
    operators = KernelOperators(torch.bfloat16, 1)
    tiled = operators.linear(torch.zeros(32, 32, dtype=torch.bfloat16), None)
    plain = operators.linear(torch.zeros(32, 24, dtype=torch.bfloat16), None)
    assert operators.group([tiled, plain]) is None
    assert operators.group([]) is None


def test_no_rows() -> None:
    assert layer(2, is_normed=True)(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_the_sum_goes_to_the_residual_stream() -> None:
    rows, stream = random(3, HIDDEN, seed=52), random(3, HIDDEN, seed=53)
    torch.testing.assert_close(Sum(None).plus(rows, stream.clone()), rows + stream)
