"""Samplers that are exact and samplers with a bias, as the bets see them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from specray.bench.verify.calibration import NUM_LIKELY, Calibration, ScoredOutput, calibrate

pytestmark = pytest.mark.slow

VOCAB_SIZE = 64
FAULT_LIMIT = 4e-5
"""A thousandth over the 23 comparisons of a run: what ``verify`` takes for a fault."""
Rows = NDArray[np.float64]
Draw = Callable[[Sequence[int], np.random.Generator], int]
"""Draws the token that follows some tokens."""


def softmax(logits: Rows) -> Rows:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


LOGITS = 2.0 * np.random.default_rng(0).standard_normal((VOCAB_SIZE, VOCAB_SIZE))
TARGET = softmax(LOGITS)
"""Distribution of the token after each token."""
DRAFT = softmax(0.8 * LOGITS + 0.4 * np.random.default_rng(1).standard_normal(LOGITS.shape))
"""A good draft: flatter than the target, as small models are, and a little off."""


def by_rejection(favour: float) -> Draw:
    """Rejection verification of a draft token; 1 is exact, more accepts too often."""

    def draw(tokens: Sequence[int], random: np.random.Generator) -> int:
        target, draft = TARGET[tokens[-1]], DRAFT[tokens[-1]]
        token = int(random.choice(VOCAB_SIZE, p=draft))
        if random.random() * draft[token] < favour * target[token]:
            return token
        residual = np.maximum(0.0, target - draft)
        return int(random.choice(VOCAB_SIZE, p=residual / residual.sum()))

    return draw


def with_one_guess(favour: float) -> Draw:
    """The same for a draft that names the token which followed before, as n-grams do."""

    def draw(tokens: Sequence[int], random: np.random.Generator) -> int:
        others = TARGET[tokens[-1]].copy()
        before = [token for last, token in itertools.pairwise(tokens) if last == tokens[-1]]
        if before:
            if random.random() < favour * others[before[-1]]:
                return before[-1]
            others[before[-1]] = 0.0
        return int(random.choice(VOCAB_SIZE, p=others / others.sum()))

    return draw


def scored(draw: Draw, *, seed: int, num_outputs: int = 96, num_tokens: int = 48) -> list[ScoredOutput]:
    """As many outputs as ``verify`` samples unless it is told otherwise."""
    random = np.random.default_rng(seed)
    outputs = []
    for index in range(num_outputs):
        tokens = [index % VOCAB_SIZE]
        for _ in range(num_tokens):
            tokens.append(draw(tokens, random))
        outputs.append(ScoredOutput(tuple(tokens), tuple(LIKELY[token] for token in tokens[:-1])))
    return outputs


def _likely(row: Rows) -> dict[int, float]:
    return {int(token): math.log(row[token]) for token in np.argsort(-row)[:NUM_LIKELY]}


LIKELY = [_likely(row) for row in TARGET]


def test_the_draft_of_these_tests_is_a_good_one() -> None:
    chances = np.minimum(TARGET, DRAFT).sum(-1)
    assert chances.mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("draw", [by_rejection(1.0), with_one_guess(1.0)])
def test_exact_draws_pass(draw: Draw) -> None:
    found = calibrate(scored(draw, seed=2))
    assert found.num_tokens == 96 * 48
    assert found.p_value > 0.01


def test_wealth_is_rare_where_draws_are_exact() -> None:
    runs = [scored(by_rejection(1.0), seed=seed, num_outputs=1, num_tokens=40) for seed in range(200)]
    chances = np.array([calibrate(run).p_value for run in runs])
    # Ville's inequality allows a share of 0.1 and of 0.01.
    assert (chances <= 0.1).mean() <= 0.1
    assert (chances <= 0.01).mean() <= 0.01


def test_a_biased_acceptance_is_found() -> None:
    found = calibrate(scored(by_rejection(2.0), seed=3))
    assert found.p_value < FAULT_LIMIT


def test_a_biased_acceptance_of_guesses_is_found() -> None:
    assert calibrate(scored(with_one_guess(2.0), seed=4)).p_value < FAULT_LIMIT


def test_draws_at_another_temperature_are_found_and_named() -> None:
    rows = softmax(0.9 * LOGITS)

    def draw(tokens: Sequence[int], random: np.random.Generator) -> int:
        return int(random.choice(VOCAB_SIZE, p=rows[tokens[-1]]))

    found = calibrate(scored(draw, seed=5))
    assert found.p_value < FAULT_LIMIT
    assert found.finding == "likely tokens too seldom"
    assert found.seen < found.expected


def test_a_penalty_that_is_none_of_the_requests_is_found_and_named() -> None:
    def draw(tokens: Sequence[int], random: np.random.Generator) -> int:
        row = TARGET[tokens[-1]].copy()
        row[list(set(tokens[-24:]))] *= 0.7
        return int(random.choice(VOCAB_SIZE, p=row / row.sum()))

    found = calibrate(scored(draw, seed=6))
    assert found.p_value < FAULT_LIMIT
    assert found.finding == "tokens of the last 24 too seldom"


def test_a_few_tokens_that_cannot_come_are_found() -> None:
    likely = ({1: math.log(0.5), 3: math.log(0.5)},)
    right = [ScoredOutput((0, int(token)), likely) for token in np.random.default_rng(7).choice([1, 3], 100)]
    assert calibrate(right).p_value > 0.01
    found = calibrate(right + [ScoredOutput((0, 2), likely)] * 3)
    assert found.p_value < FAULT_LIMIT
    assert found.finding == "the 20 likeliest tokens too seldom"
    assert found.seen == pytest.approx(100 / 103)
    assert found.expected == 1.0


def test_the_token_that_followed_before_is_bet_on() -> None:
    """Four tokens are as likely, and all of them came before; the one that followed 5 comes each time."""
    likely = dict.fromkeys((6, 7, 8, 9), math.log(0.25))
    found = calibrate([ScoredOutput((5, 8, 6, 7, 9, 5, 8), (likely,))] * 40)
    assert found.finding == "what followed the last token before too often"
    assert (found.seen, found.expected) == (1.0, 0.25)
    # A bet of strength 8 wins almost 4 each time.
    assert found.p_value == pytest.approx(100 / 4**40, rel=1.0)


def test_a_token_that_comes_too_often_is_bet_on_although_nothing_else_marks_it() -> None:
    """All tokens are as likely, and none was in the prompt."""
    likely = dict.fromkeys((6, 7, 8, 9), math.log(0.25))
    outputs = [ScoredOutput((5, token), (likely,)) for token in (8, 6, 8, 7, 8, 9, 8, 8) * 20]
    found = calibrate(outputs)
    assert found.finding == "tokens with a surplus before too often"
    assert found.p_value < FAULT_LIMIT
    evenly = [ScoredOutput((5, token), (likely,)) for token in (8, 6, 7, 9) * 40]
    assert calibrate(evenly).finding == "tokens with a surplus before too seldom"


def test_no_output_says_nothing() -> None:
    assert calibrate([]) == Calibration(0, 1.0, "", 0.0, 0.0)
    assert calibrate([ScoredOutput((1, 2), ())]) == Calibration(0, 1.0, "", 0.0, 0.0)
