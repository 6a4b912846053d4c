"""Which experts are chosen and what they weigh, number by number, for each rule of a family."""

from __future__ import annotations

import math

import pytest
import torch

from specray.engine.model.layers.experts.config import Groups, Routing, Score
from specray.engine.model.layers.experts.routing import Router

ODDS = math.log(3.0)
"""A product whose sigmoid is 3/4; of twice it 9/10."""


def routed(
    routing: Routing, products: list[list[float]], bias: list[float] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """The choice and the weights of rows with these products."""
    router = Router(lambda rows: rows, routing, None if bias is None else torch.tensor(bias))
    chosen, weights = router(torch.tensor(products))
    assert (chosen.dtype, weights.dtype) == (torch.int64, torch.float32)
    return chosen.tolist(), [[round(weight, 5) for weight in row] for row in weights.tolist()]


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("chooses_by_product", [False, True])
def test_of_equal_numbers_the_lower_experts_are_chosen(score: Score, chooses_by_product: bool) -> None:
    routing = Routing(3, score=score, chooses_by_product=chooses_by_product, is_normed=True)
    chosen, weights = routed(routing, [[1.0] * 64, [0.0, *[2.0] * 63]])
    assert chosen == [[0, 1, 2], [1, 2, 3]]
    assert weights == [[0.33333] * 3] * 2


def test_softmax_over_all_and_over_the_chosen() -> None:
    products = [[0.0, math.log(2.0), math.log(5.0)]]
    assert routed(Routing(2), products) == ([[2, 1]], [[0.625, 0.25]])
    for routing in (Routing(2, is_normed=True), Routing(2, chooses_by_product=True)):
        assert routed(routing, products) == ([[2, 1]], [[round(5 / 7, 5), round(2 / 7, 5)]])


def test_products_choose_where_their_scores_are_equal() -> None:
    """In float32 both sigmoids are 1."""
    products = [[40.0, 50.0, 0.0]]
    assert routed(Routing(1, score=Score.SIGMOID), products)[0] == [[0]]
    assert routed(Routing(1, score=Score.SIGMOID, chooses_by_product=True), products)[0] == [[1]]


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    routing, products = Routing(1, score=Score.SIGMOID), [[ODDS, 2 * ODDS, 0.0]]
    assert routed(routing, products) == ([[1]], [[0.9]])
    assert routed(routing, products, [0.2, 0.0, 0.0]) == ([[0]], [[0.75]])
    assert routed(routing, products, [0.0, 0.0, 9.0]) == ([[2]], [[0.5]])


def test_a_bias_of_products_is_no_bias_of_scores() -> None:
    """Added to sigmoids it would not change the choice."""
    products, bias = [[2 * ODDS, 20.0]], [18.0, 0.0]
    by_product = Routing(1, score=Score.SIGMOID, chooses_by_product=True)
    assert routed(by_product, products, bias) == ([[0]], [[0.9]])


def test_a_group_with_all_scores_below_another_s_is_left_out() -> None:
    """Its members would come before the other group's third."""
    routing = Routing(3, score=Score.SIGMOID, groups=Groups(2, 1, 2))
    assert routed(routing, [[3.0, 3.0, -5.0, 2.0, 2.0, 2.0]])[0] == [[0, 1, 2]]


def test_groups_count_by_the_sum_of_their_two_best() -> None:
    products = [[4.0, -9.0, 2.0, 2.0]]
    both = [
        routed(Routing(1, score=Score.SIGMOID, groups=Groups(2, 1, best)), products)[0] for best in (1, 2)
    ]
    assert both == [[[0]], [[2]]]


def test_a_bias_decides_between_groups_and_of_equal_ones_the_first_is_kept() -> None:
    routing = Routing(2, score=Score.SIGMOID, groups=Groups(3, 2, 2))
    products = [[0.0] * 6]
    assert routed(routing, products)[0] == [[0, 1]]
    assert routed(routing, products, [0.0, 0.0, 0.0, 0.0, -0.1, 0.1])[0] == [[0, 1]]
    assert routed(routing, products, [0.0, 0.0, 0.0, 0.0, 0.0, 0.1])[0] == [[5, 0]]


def test_weights_below_the_floor_do_not_add_up_to_one() -> None:
    products = [[0.0, math.log(2.0), math.log(5.0)]]
    assert routed(Routing(1, is_normed=True, floor=0.5), products)[1] == [[1.0]]
    assert routed(Routing(1, is_normed=True, floor=0.9), products)[1] == [[round(0.625 / 0.9, 5)]]


def test_a_sum_of_zero_is_divided_by_epsilon_alone() -> None:
    routing = Routing(2, score=Score.SIGMOID, is_normed=True, epsilon=1e-20)
    assert routed(routing, [[-200.0] * 3])[1] == [[0.0, 0.0]]


def test_weights_are_scaled_after_they_are_normed() -> None:
    routing = Routing(2, score=Score.SIGMOID, is_normed=True, scale=2.5)
    assert routed(routing, [[0.0, 0.0, -9.0]])[1] == [[1.25, 1.25]]


def test_weights_are_rounded_to_the_type_of_the_rows() -> None:
    rows = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    weights = [
        Router(lambda rows: rows, Routing(2, is_rounded=rounded))(rows)[1] for rounded in (True, False)
    ]
    assert torch.equal(weights[0], weights[1].bfloat16().float())
    assert not torch.equal(*weights)


def test_wide_products_are_those_of_float32_rows() -> None:
    """Rounded to bfloat16 both would be equal, and the lower expert chosen."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]])
    rows = torch.ones(1, 2, dtype=torch.bfloat16)
    wide = Router(lambda rows: rows @ weight.T, Routing(1, is_wide=True))
    narrow = Router(lambda rows: rows @ weight.T.bfloat16(), Routing(1))
    assert [int(router(rows)[0]) for router in (wide, narrow)] == [1, 0]


@pytest.mark.parametrize("groups", [None, Groups(2, 1, 2)])
def test_no_rows(groups: Groups | None) -> None:
    chosen, weights = Router(lambda rows: rows, Routing(2, groups=groups))(torch.empty(0, 4))
    assert chosen.shape == weights.shape == (0, 2)
