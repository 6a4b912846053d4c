"""Scores that are capped, and sinks that take weight: against numbers worked out by hand."""

import math

import pytest
import torch

from specray.engine.attention.scores import ScoreRule, attend_by_rule


def attended(rule: ScoreRule, mask: torch.Tensor | None = None) -> list[list[float]]:
    """One kv head, one row, two query heads of scores (2, 0) and (0, 4) with two keys."""
    query = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]])
    keys, values = (
        torch.tensor([[[[4.0, 0.0], [0.0, 4.0]]]]),
        torch.tensor([[[[1.0, 0.0, 7.0], [0.0, 1.0, 7.0]]]]),
    )
    output = attend_by_rule(query, keys, values, mask, 0.5, rule)
    assert output.shape == (1, 1, 2, 3)
    return output[0, 0].tolist()


def weights(*scores: float) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def test_a_soft_cap_bounds_scores_before_the_softmax() -> None:
    one, other = attended(ScoreRule(softcap=3.0))
    assert one[:2] == pytest.approx(weights(3 * math.tanh(2 / 3), 0))
    assert other[:2] == pytest.approx(weights(0, 3 * math.tanh(4 / 3)))


def test_each_head_has_a_sink_of_its_own_that_gives_no_value() -> None:
    one, other = attended(ScoreRule(sinks=torch.tensor([1.0, -2.0])))
    assert one[:2] == pytest.approx(weights(2, 0, 1)[:2])
    assert other[:2] == pytest.approx(weights(0, 4, -2)[:2])
    assert one[2] == pytest.approx(7 * (1 - weights(2, 0, 1)[2]))


def test_a_hidden_key_has_no_weight_and_the_sink_is_not_hidden() -> None:
    mask = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    one, other = attended(ScoreRule(softcap=3.0, sinks=torch.tensor([1.0, -2.0])), mask)
    assert one == pytest.approx(
        [weights(3 * math.tanh(2 / 3), 1)[0], 0, 7 * weights(3 * math.tanh(2 / 3), 1)[0]]
    )
    assert other[0] == 0
    assert other[1] == pytest.approx(weights(3 * math.tanh(4 / 3), -2)[0])


def test_heads_keep_their_sinks_in_further_rows_and_kv_heads() -> None:
    """Rows of one group lie side by side: sinks repeat with each row, and differ between kv heads."""
    query, keys, values = torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 3, 4), torch.ones(2, 1, 3, 1)
    output = attend_by_rule(
        query, keys, values, None, 1.0, ScoreRule(sinks=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    )
    expected = [3 / (3 + math.exp(sink)) for sink in (0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3)]
    assert output.flatten().tolist() == pytest.approx(expected)


def test_numbers_of_half_the_size_are_attended_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 1, 5, 8, generator=generator).bfloat16() for _ in range(3))
    rule = ScoreRule(softcap=2.0, sinks=torch.tensor([0.5]))
    half = attend_by_rule(query, keys, values, None, 1.0, rule)
    whole = attend_by_rule(query.float(), keys.float(), values.float(), None, 1.0, rule)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, whole.bfloat16())
