"""Rounds as a caller that watches its request is told of them."""

from __future__ import annotations

import pytest

from specray.control.state import Plan
from specray.draft_tokens import DraftTokens, SparseProbs
from specray.fakes import PerfectGuesser, RandomGuesser, VirtualClock
from specray.requests import OutputChunk, SpeculationParams
from specray.round_reports import EngineStep, RoundReport
from specray.router.output.watch import RoundWatch
from specray.router.session.values import Commit, Lookup
from specray.types import VerifyItem
from tests.unit.router.harness import MODEL, expected, fake_draft, in_virtual_time, request, serving

WATCHED = SpeculationParams(reports_rounds=True)


@in_virtual_time
async def chunks_of(
    clock: VirtualClock,
    guesser: object,
    max_tokens: int,
    *,
    speculation: SpeculationParams = WATCHED,
    **options: object,
) -> list[OutputChunk]:
    """A stream on a router over fakes: 20 ms a Verify, 4 ms a draft token."""
    async with serving(clock, draft=fake_draft(guesser), **options) as pair:
        asked = request("a", max_tokens=max_tokens, speculation=speculation)
        return [chunk async for chunk in pair.router.stream(asked)]


def rounds_of(guesser: object, max_tokens: int, **options: object) -> list[RoundReport]:
    return [report for chunk in chunks_of(guesser, max_tokens, **options) for report in chunk.rounds]


def test_serial_rounds_to_the_millisecond() -> None:
    output = expected(request(max_tokens=6))
    assert rounds_of(PerfectGuesser(MODEL), 6, overlap="serial", num_speculative_tokens=2) == [
        RoundReport(
            token_ids=output[:1],
            draft_token_ids=(),
            num_accepted_tokens=0,
            source="",
            lookup="",
            overlap="off",
            num_speculative_tokens=0,
            reason="prefill",
            verify=EngineStep(0.0, 20.0, 20.0),
            drafting=(EngineStep(0.0, 8.0, 8.0),),
        ),
        RoundReport(
            token_ids=output[1:3],
            draft_token_ids=output[1:2],
            num_accepted_tokens=1,
            source="model",
            lookup="hit",
            overlap="serial",
            num_speculative_tokens=2,
            reason="fixed",
            verify=EngineStep(20.0, 40.0, 20.0),
        ),
        RoundReport(
            token_ids=output[3:],
            draft_token_ids=output[3:5],
            num_accepted_tokens=2,
            source="model",
            lookup="",
            overlap="serial",
            num_speculative_tokens=2,
            reason="fixed",
            verify=EngineStep(48.0, 68.0, 20.0),
            drafting=(EngineStep(40.0, 48.0, 8.0),),
        ),
    ]


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate"])
def test_rounds_bring_exactly_the_tokens_of_their_chunks(overlap: str) -> None:
    chunks = chunks_of(RandomGuesser(MODEL), 40, overlap=overlap, num_speculative_tokens=3)
    for chunk in chunks:
        assert tuple(token for report in chunk.rounds for token in report.token_ids) == chunk.token_ids
    assert sum(len(chunk.token_ids) for chunk in chunks) == 40
    reports = [report for chunk in chunks for report in chunk.rounds]
    last = chunks[-1].stats
    assert last is not None
    assert sum(len(report.draft_token_ids) for report in reports) == last.num_draft_tokens
    assert sum(report.num_accepted_tokens for report in reports) == last.num_accepted_draft_tokens


def test_a_request_that_does_not_ask_is_told_nothing() -> None:
    chunks = chunks_of(PerfectGuesser(MODEL), 6, speculation=SpeculationParams(), overlap="serial")
    assert {chunk.rounds for chunk in chunks} == {()}


async def test_a_watch_is_forgotten_with_its_request(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        assert (await pair.router.complete(request("a", speculation=WATCHED))).rounds
        assert (await pair.router.complete(request("a"))).rounds == ()


def test_probabilities_are_those_of_the_tokens_that_were_sampled() -> None:
    watch = RoundWatch(lambda: 1.5, arrived_s=1.0)
    rows = (SparseProbs((4, 9), (0.25, 0.75)), SparseProbs((2,), (1.0,)))
    watch.verify_sent(VerifyItem("a", 1, 0, (1,), DraftTokens((9, 2), probs=rows), sample=True))
    watch.committed(Commit((9, 7), (), 2, 1, 1, Lookup.NOT_ASKED), Plan(2), 3_000_000)
    (report,) = watch.take()
    assert report.draft_probs == (0.75, 1.0)
    assert report.verify == EngineStep(500.0, 500.0, 3.0)
    assert watch.take() == ()


def test_a_reply_that_nobody_asked_for_is_no_step() -> None:
    watch = RoundWatch(lambda: 0.0, arrived_s=0.0)
    watch.draft_replied(5)
    watch.draft_asked()
    watch.draft_replied(2_000_000)
    watch.committed(Commit((9,), (), 0, 0, 0, Lookup.NOT_ASKED), Plan(0), 0)
    (report,) = watch.take()
    assert report.drafting == (EngineStep(0.0, 0.0, 2.0),)
