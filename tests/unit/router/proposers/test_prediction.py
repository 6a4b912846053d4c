"""Predicted outputs: proposed first where the output follows them, and never at the output's cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.fakes import NoisyGuesser, PerfectGuesser, ToyModel, VirtualClock
from specray.requests import GenerateRequest, SpeculationParams
from specray.router.session.values import PREDICTION
from specray.types import DraftKind, Verification
from tests.unit.router.harness import fake_draft, request, router_config, run, serving
from tests.unit.router.proposers.harness import (
    CHANGING,
    REPEATING,
    of_source,
    serve_and_ask,
    target_of,
    truth,
)

EDITS = ("equal", "edited", "shifted", "halved", "unrelated", "wrong")


def edited(output: tuple[int, ...], how: str) -> tuple[int, ...]:
    """A prediction that is not quite the output."""
    match how:
        case "edited":
            # Replaced, inserted and deleted.
            return (*output[:5], 63, *output[6:9], 62, 61, *output[9:14], *output[17:])
        case "shifted":
            return (60, 59, 58, *output)
        case "halved":
            return output[: len(output) // 2]
        case "unrelated":
            return ToyModel(salt=99).generate((1,), max(4, len(output)))
        case "wrong":
            return tuple((token + 1) % 64 for token in output)
    return output


def predicting(model: ToyModel, given: GenerateRequest, how: str = "equal") -> GenerateRequest:
    prediction = edited(truth(model, given), how)
    return replace(given, speculation=replace(given.speculation, prediction=prediction))


def requests_of(model: ToyModel, how: str) -> list[GenerateRequest]:
    given = [
        request("short", (7,), 1),
        request("long", tuple(index % 8 for index in range(70)), 23),
        request("greedy", (5, 5, 5), 40),
        request("seeded", (4, 3, 2), 30, temperature=1.0, seed=1234),
        request("rejection", (1, 2), 30, temperature=1.0, seed=9, verification=Verification.REJECTION),
        request("ngram", (1, 3), 30, speculation=SpeculationParams(draft=DraftKind.NGRAM)),
    ]
    return [predicting(model, each, how) for each in given]


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate", "auto"])
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("k", [0, 3, "auto", *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7))])
@pytest.mark.parametrize("has_model", [True, False])
def test_output_is_the_targets_alone(how: str, k: int | str, overlap: str, has_model: bool) -> None:
    given = requests_of(CHANGING, how)
    outputs, pair = serve_and_ask(
        CHANGING,
        given,
        draft=fake_draft(NoisyGuesser(CHANGING)),
        has_draft_model=has_model,
        config=router_config(prefill_chunk_tokens=16),
        overlap=overlap,
        num_speculative_tokens=k,
        fallback="ngram",
    )
    for each, output in zip(given, outputs, strict=True):
        assert output.token_ids == truth(CHANGING, each), each.request_id
    accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
    assert accepted + pair.counted("specray_rounds_total") == sum(len(output.token_ids) for output in outputs)
    drafts, _, accepted = of_source(pair, PREDICTION)
    assert (drafts > 0) == (k != 0)
    if k not in (0, 1):
        assert (accepted >= 50) == (how not in ("unrelated", "wrong"))


@pytest.mark.parametrize("seed", range(6))
def test_losses_and_restarts_change_nothing(seed: int) -> None:
    clock = VirtualClock()

    async def main() -> None:
        target = target_of(CHANGING)
        async with serving(clock, target=target, overlap="enumerate", config=router_config()) as pair:
            given = predicting(CHANGING, request("a", (seed,), 60), "edited")
            task = asyncio.create_task(pair.router.complete(given))
            for _ in range(3):
                await asyncio.sleep(0.03 + 0.011 * seed)
                target.forget("a")
            assert (await task).token_ids == truth(CHANGING, given)

    run(clock, main())


def ask(how: str, *, model: ToyModel = CHANGING, max_tokens: int = 100, **options: Any) -> Any:
    """(output, pair) of one request."""
    given = predicting(model, request("a", (3, 1, 4), max_tokens), how)
    options = {"draft": fake_draft(PerfectGuesser(model)), "overlap": "enumerate", **options}
    (output,), pair = serve_and_ask(model, [given], **options)
    assert output.token_ids == truth(model, given)
    return output, pair


def test_predicted_output_comes_in_windows_and_the_draft_is_not_asked() -> None:
    output, pair = ask("equal")
    assert output.stats.num_spec_steps == pair.target.num_steps <= 10
    # Beside the last window's, whose end is the output's, nothing was drafted in vain.
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
    given = predicting(REPEATING, request("a", (3, 1, 4), 40))
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
