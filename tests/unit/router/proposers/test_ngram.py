"""Drafts without a model: of their own and by request; never at the output's cost."""

from __future__ import annotations

import pytest

from specray.errors import InvalidRequestError
from specray.fakes import PerfectGuesser, ToyModel, VirtualClock
from specray.requests import GenerateRequest, SpeculationParams
from specray.types import DraftKind, Verification
from tests.unit.router.harness import Pair, fake_draft, in_virtual_time, request, serving
from tests.unit.router.proposers.harness import (
    CHANGING,
    REPEATING,
    of_source,
    serve_and_ask,
    target_of,
    truth,
)

LOCAL = (DraftKind.NGRAM, DraftKind.SUFFIX)


def by_request(draft: DraftKind, tenant: str = "", k: int | None = None) -> SpeculationParams:
    return SpeculationParams(num_speculative_tokens=k, draft=draft, tenant=tenant)


# A draft of its own


@pytest.mark.parametrize("kind", LOCAL)
async def test_draft_of_its_own_adds_no_time_to_a_round(clock: VirtualClock, kind: DraftKind) -> None:
    """60 tokens in circles: every step is a verify of 20 ms, and nothing else takes time."""

    async with serving(
        clock,
        target=target_of(REPEATING),
        draft_kind=kind,
        has_draft_model=False,
        num_speculative_tokens=4,
    ) as pair:
        await pair.router.complete(request("a", max_tokens=60))
        assert clock.monotonic() == pytest.approx(0.020 * pair.target.num_steps)
        assert pair.target.num_steps < 24
        assert (await pair.router.service_info()).draft_model == kind.value


def test_speculation_that_is_off_is_off() -> None:
    wishes = [SpeculationParams(enabled=False), SpeculationParams(num_speculative_tokens=0)]
    given = [request(str(index), speculation=wish) for index, wish in enumerate(wishes)]
    _, pair = serve_and_ask(REPEATING, given, draft_kind=DraftKind.NGRAM, has_draft_model=False)
    assert pair.counted("specray_spec_decode_num_drafts_total") == 0


def test_wrong_lookups_are_left_off_when_rows_are_dear() -> None:
    """Each row costs a tenth of a step: what is never accepted must not be paid for, but for a few tries."""
    given = [request("a", tuple([1, 2, 3] * 20), 600)]
    never, _ = _seconds(CHANGING, given, SpeculationParams(enabled=False))
    tried, pair = _seconds(CHANGING, given, SpeculationParams())
    assert tried <= never * 1.02
    assert of_source(pair, "ngram")[1] > 0


@in_virtual_time
async def _seconds(
    clock: VirtualClock, model: ToyModel, given: list[GenerateRequest], speculation: SpeculationParams
) -> tuple[float, Pair]:
    async with serving(
        clock, target=target_of(model, 0.002), draft_kind=DraftKind.NGRAM, has_draft_model=False
    ) as pair:
        warm = request("warm", max_tokens=10, speculation=SpeculationParams(enabled=False))
        await pair.router.complete(warm)
        started = clock.monotonic()
        for each in given:
            wish = GenerateRequest(
                each.request_id,
                each.prompt_token_ids,
                each.sampling,
                each.max_tokens,
                speculation=speculation,
            )
            await pair.router.complete(wish)
        return clock.monotonic() - started, pair


# By request


def test_requests_choose_what_drafts_for_them() -> None:
    given = [
        request("model", max_tokens=40, speculation=by_request(DraftKind.MODEL, k=3)),
        request("ngram", max_tokens=40, speculation=by_request(DraftKind.NGRAM, k=3)),
        request("suffix", max_tokens=40, speculation=by_request(DraftKind.SUFFIX, k=3)),
    ]
    for overlap in ("serial", "enumerate"):
        draft = fake_draft(PerfectGuesser(REPEATING))
        outputs, pair = serve_and_ask(REPEATING, given, draft=draft, overlap=overlap)
        assert [output.token_ids for output in outputs] == [truth(REPEATING, each) for each in given]
        for source, output in zip(("model", "ngram", "suffix"), outputs, strict=True):
            assert output.stats is not None
            assert of_source(pair, source)[:2] == (output.stats.num_spec_steps, output.stats.num_draft_tokens)
            assert output.stats.num_accepted_draft_tokens > 10


def test_model_is_not_asked_for_a_request_that_wants_none() -> None:
    draft = fake_draft(PerfectGuesser(REPEATING))
    given = [request("a", max_tokens=30, speculation=by_request(DraftKind.SUFFIX))]
    _, pair = serve_and_ask(REPEATING, given, draft=draft, overlap="enumerate")
    assert draft.num_steps == 0
    assert of_source(pair, "suffix")[2] > 10


def test_request_for_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ngram, suffix") as caught:
        serve_and_ask(
            REPEATING,
            [request(speculation=by_request(DraftKind.MODEL))],
            has_draft_model=False,
            draft_kind=DraftKind.NGRAM,
        )
    assert caught.value.field == "draft"


async def test_past_outputs_serve_the_same_tenant_alone(clock: VirtualClock) -> None:
    async with serving(
        clock,
        target=target_of(CHANGING),
        has_draft_model=False,
        draft_kind=DraftKind.SUFFIX,
        num_speculative_tokens=3,
        past_output_tokens=1000,
    ) as pair:

        async def steps(request_id: str, tenant: str) -> int:
            before = pair.target.num_steps
            wish = by_request(DraftKind.SUFFIX, tenant)
            output = await pair.router.complete(request(request_id, max_tokens=40, speculation=wish))
            assert output.token_ids == CHANGING.generate((3, 1, 4, 1, 5), 40)
            return pair.target.num_steps - before

        first = await steps("first", "a")
        # The same prompt gives the same output, which is known now.
        assert await steps("again", "a") < first / 2
        assert await steps("other", "b") == first
        assert await steps("nobody", "") == first


@pytest.mark.parametrize(
    ("temperature", "verification", "is_kept"),
    [
        (1.0, Verification.REJECTION, False),
        (1.0, Verification.COUPLED, True),
        (0.0, Verification.REJECTION, True),
    ],
)
async def test_outputs_that_tests_of_acceptance_drew_are_no_drafts_for_the_same_tests(
    clock: VirtualClock, temperature: float, verification: Verification, is_kept: bool
) -> None:
    """Of the same seed, so that they would know how the test of their own tokens ends."""

    async with serving(
        clock,
        target=target_of(CHANGING),
        has_draft_model=False,
        draft_kind=DraftKind.SUFFIX,
        num_speculative_tokens=3,
        past_output_tokens=1000,
    ) as pair:
        for name in "ab":
            given = request(
                name,
                max_tokens=40,
                temperature=temperature,
                seed=5,
                verification=verification,
                speculation=by_request(DraftKind.SUFFIX, "tenant"),
            )
            await pair.router.complete(given)
        assert (of_source(pair, "suffix")[2] > 0) is is_kept


async def test_nothing_is_kept_by_default(clock: VirtualClock) -> None:
    async with serving(
        clock, target=target_of(CHANGING), has_draft_model=False, num_speculative_tokens=3
    ) as pair:
        for name in "ab":
            wish = by_request(DraftKind.SUFFIX, "tenant")
            await pair.router.complete(request(name, max_tokens=40, speculation=wish))
        assert of_source(pair, "suffix")[2] == 0
