"""Routed experts: each row has the sum of its own, whatever rows are beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp, ExpertsInTurn, Sum
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.shortcut import Shortcut
from specray.engine.model.linear import make_gate, make_linear

NUM_EXPERTS, HIDDEN, INNER = 5, 16, 24


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
        Router(partial(F.linear, weight=ROUTER), Routing(num_chosen, is_normed=is_normed)),
        ExpertsInTurn(experts),
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


def test_no_rows() -> None:
    assert layer(2, is_normed=True)(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_a_shortcut_adds_rows_that_are_given_back_on_one_rank() -> None:
    """The third row's choices are all given back; those of the first are all experts."""
    chosen = torch.tensor([[2, 1], [6, 3], [7, 5]])
    weights = torch.tensor([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]])
    hits, rows = torch.zeros(1, dtype=torch.int32), random(3, HIDDEN, seed=54)
    routed = replace(layer(2, is_normed=False), router=lambda _: (chosen, weights), hits=hits)
    first, other = (Shortcut(routed, NUM_EXPERTS, adds_rows, Sum(None)) for adds_rows in (True, False))
    experts = routed.experts
    expected = [
        experts(rows[:1], chosen[:1], weights[:1])[0],
        experts(rows[1:2], chosen[1:2, 1:], weights[1:2, 1:])[0],
        torch.zeros(HIDDEN),
    ]
    torch.testing.assert_close(other(rows), torch.stack(expected))
    given_back = torch.stack([0.0 * rows[0], 0.5 * rows[1], 0.75 * rows[2]])
    torch.testing.assert_close(first(rows), torch.stack(expected) + given_back)
    assert hits.tolist() == [4]
    assert first(rows[:0]).shape == (0, HIDDEN) and hits.tolist() == [0]


def test_the_sum_goes_to_the_residual_stream() -> None:
    rows, stream = random(3, HIDDEN, seed=52), random(3, HIDDEN, seed=53)
    torch.testing.assert_close(Sum(None).plus(rows, stream.clone()), rows + stream)
