"""Predicted outputs: proposed first where the output follows them, and never at the output's cost."""

from __future__ import annotations

from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.fakes import PerfectGuesser, ToyModel
from specray.requests import GenerateRequest, SpeculationParams
from specray.router.session.values import PREDICTION
from specray.types import DraftKind
from tests.unit.router.drafts import predicting
from tests.unit.router.harness import fake_draft, request
from tests.unit.router.proposers.harness import (
    CHANGING,
    REPEATING,
    of_source,
    serve_and_ask,
    target_of,
    truth,
)


def predicted_request(model: ToyModel, given: GenerateRequest, how: str = "equal") -> GenerateRequest:
    return predicting(given, truth(model, given), how)


def ask(how: str, *, model: ToyModel = CHANGING, max_tokens: int = 100, **options: Any) -> Any:
    """(output, pair) of one request."""
    given = predicted_request(model, request("a", (3, 1, 4), max_tokens), how)
    options = {"draft": fake_draft(PerfectGuesser(model)), "overlap": "enumerate", **options}
    (output,), pair = serve_and_ask(model, [given], **options)
    assert output.token_ids == truth(model, given)
    return output, pair


def test_predicted_output_comes_in_windows_and_the_draft_is_not_asked() -> None:
    output, pair = ask("equal")
    assert output.stats.num_spec_steps == pair.target.num_steps <= 10
    # Besides the last window's, whose end is the output's, nothing was drafted in vain.
    assert of_source(pair, PREDICTION)[1:] == (100 - pair.target.num_steps,) * 2
    # It reads the prompt, to be ready.
    assert of_source(pair, "model") == (0, 0, 0) and pair.draft.num_steps <= 2
    assert output.stats.acceptance_histogram[-1] > 0 and len(output.stats.acceptance_histogram) == 33


def test_fixed_k_bounds_the_windows() -> None:
    output, _ = ask("equal", num_speculative_tokens=4)
    assert len(output.stats.acceptance_histogram) == 5
    assert 20 <= output.stats.num_spec_steps <= 21


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_where_the_output_leaves_its_prediction_the_draft_is_asked(overlap: str) -> None:
    output, pair = ask("halved", overlap=overlap, num_speculative_tokens=4)
    _, _, predicted = of_source(pair, PREDICTION)
    _, _, drafted = of_source(pair, "model")
    assert 38 <= predicted <= 50 and drafted >= 30
    assert output.stats.num_spec_steps <= 22


def test_unrelated_prediction_costs_next_to_nothing() -> None:
    _, pair = ask("unrelated", max_tokens=300, has_draft_model=False)
    drafts, tokens, _ = of_source(pair, PREDICTION)
    assert drafts <= 6 and tokens <= 50
    assert pair.target.num_steps == 300


def test_no_more_is_proposed_than_rows_are_worth() -> None:
    """A row costs ten times what a step does without: verifying more than one gains nothing."""
    target = target_of(CHANGING, rows_s=0.2)
    _, pair = ask("equal", target=target, has_draft_model=False)
    drafts, _, _ = of_source(pair, PREDICTION)
    assert drafts <= 8


def test_prediction_goes_before_a_draft_without_a_model() -> None:
    given = predicted_request(REPEATING, request("a", (3, 1, 4), 40))
    _, pair = serve_and_ask(REPEATING, [given], draft_kind=DraftKind.NGRAM, has_draft_model=False)
    assert of_source(pair, PREDICTION)[2] > 30
    assert of_source(pair, "ngram") == (0, 0, 0)


@pytest.mark.parametrize(
    ("how", "counts"), [("equal", (40, 0)), ("edited", (36, 3)), ("halved", (20, 0)), ("wrong", (0, 40))]
)
def test_tokens_of_the_prediction_count_as_accepted_or_rejected(how: str, counts: tuple[int, int]) -> None:
    """Whoever proposed them: those that stand in the output, and those that do not."""
    output, _ = ask(how, max_tokens=40)
    stats = output.stats
    assert (stats.num_accepted_prediction_tokens, stats.num_rejected_prediction_tokens) == counts


def test_request_that_does_not_speculate_has_no_use_for_a_prediction() -> None:
    given = request("a", speculation=SpeculationParams(enabled=False, prediction=(1, 2, 3)))
    (output,), pair = serve_and_ask(CHANGING, [given])
    assert of_source(pair, PREDICTION) == (0, 0, 0)
    assert output.stats is not None and output.stats.num_rejected_prediction_tokens == 0


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ((1, 64), "prediction holds token id 64; allowed: 0..63"),
        ((-1,), "prediction holds token id -1; allowed: 0..63"),
        ((1,) * 4097, "prediction has 4097 tokens; allowed: at most 4096"),
    ],
)
def test_prediction_that_cannot_be_is_refused(prediction: tuple[int, ...], message: str) -> None:
    given = request("a", speculation=SpeculationParams(prediction=prediction))
    with pytest.raises(InvalidRequestError) as caught:
        serve_and_ask(CHANGING, [given])
    assert (str(caught.value), caught.value.field) == (message, "prediction")
