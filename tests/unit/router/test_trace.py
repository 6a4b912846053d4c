"""The router's trace: what is in it, how much of it is kept, and where it can be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specray.errors import ConfigError
from specray.fakes import FakeRouterClient, PerfectGuesser, RandomGuesser, VirtualClock
from specray.router.trace import (
    Decided,
    DraftAsked,
    DraftReplied,
    DraftSkipped,
    ExperimentEnded,
    LookedUp,
    Planned,
    Routed,
    Trace,
    TraceEvent,
    VerdictReceived,
    VerifySent,
    decode_trace,
    encode_trace,
)
from tests.unit.router.harness import (
    MODEL,
    PROMPT,
    fake_draft,
    in_virtual_time,
    request,
    router_config,
    serving,
)
from tests.unit.serving.http import service as http_service

MS = 1_000_000
EVENTS: list[TraceEvent] = [
    Planned(1, "a", "model", "enumerate", 3, 2, "profitable", 4, 0.75, {"off": 50.0, "enumerate": 92.5}),
    DraftAsked(2, "a", 1, 0, 5, 3, (2, 1, 1), 6, 0.25),
    DraftReplied(3, "a", 1, "outcomes", 400, 12, 4, False),
    DraftSkipped(4, "b"),
    VerifySent(5, "a", 2, 7, 5, 1, 3),
    VerdictReceived(6, "a", 2, 900, "model", 3, 2, 3, "profitable"),
    VerdictReceived(6, "a", 3, 900, "model", 9, 2, 3, "profitable", depth=4),
    LookedUp(7, "a", "miss_token", 0),
    Routed(8, "a", "r1", "prefix", {"r1": 0.25, "r2": 0.5}, 100, 96),
    Decided(8, "model", None, 1.5, 1.25, 4),
    Decided(9, "model", "plain", 1.5, 1.25, 4),
    ExperimentEnded(10, "model", "plain", "model", 1.5, 1.125),
    ExperimentEnded(11, "plain", "ngram", "ngram", 1.0, None),
]


@in_virtual_time
async def traced(clock: VirtualClock, guesser: object, max_tokens: int, **options: Any) -> list[TraceEvent]:
    """One request on a router over fakes: 20 ms a Verify, 4 ms a draft token."""
    config = router_config(trace_events=1000)
    async with serving(clock, draft=fake_draft(guesser), config=config, **options) as pair:
        await pair.router.complete(request("a", max_tokens=max_tokens))
        return decode_trace(await pair.router.trace_text() or "")


def test_serial_session_to_the_event() -> None:
    planned = Planned(0, "a", "model", "serial", 2, 1, "fixed", 1, 0.7, {})
    told = traced(PerfectGuesser(MODEL), 6, overlap="serial", num_speculative_tokens=2)
    assert told[:12] == [
        VerifySent(0, "a", 1, 1, 0, 5, 0),
        planned,
        DraftAsked(0, "a", 1, 0, 5, 2, ()),
        DraftReplied(8 * MS, "a", 1, "proposal", 8 * MS, 2, 0, False),
        VerdictReceived(20 * MS, "a", 1, 20 * MS, "model", 0, 0, 1, "prefill"),
        LookedUp(20 * MS, "a", "hit", 1),
        VerifySent(20 * MS, "a", 2, 2, 5, 1, 1),
        VerdictReceived(40 * MS, "a", 2, 20 * MS, "model", 1, 1, 2, "fixed"),
        DraftAsked(40 * MS, "a", 2, 5, 3, 2, ()),
        DraftReplied(48 * MS, "a", 2, "proposal", 8 * MS, 2, 0, False),
        VerifySent(48 * MS, "a", 3, 3, 6, 2, 2),
        VerdictReceived(68 * MS, "a", 3, 20 * MS, "model", 2, 2, 3, "fixed"),
    ]
    # The plan ends with the round; the next one is prepared.
    assert [
        replace(event, acceptance=0.0, tokens_per_s={}) for event in told[12:] if type(event) is Planned
    ] == [replace(planned, ns=68 * MS, acceptance=0.0)]


def test_overlapped_session_to_the_event() -> None:
    told = traced(PerfectGuesser(MODEL), 6, overlap="ahead", num_speculative_tokens=2)
    assert [event for event in told if type(event) is not Planned] == [
        VerifySent(0, "a", 1, 1, 0, 5, 0),
        DraftAsked(0, "a", 1, 0, 5, 2, (1,)),
        DraftReplied(12 * MS, "a", 1, "outcomes", 12 * MS, 2, 1, False),
        VerdictReceived(20 * MS, "a", 1, 20 * MS, "model", 0, 0, 1, "prefill"),
        LookedUp(20 * MS, "a", "hit", 2),
        VerifySent(20 * MS, "a", 2, 2, 5, 1, 2),
        DraftAsked(20 * MS, "a", 2, 5, 1, 2, (0, 0, 1)),
        DraftReplied(32 * MS, "a", 2, "outcomes", 12 * MS, 2, 1, False),
        VerdictReceived(40 * MS, "a", 2, 20 * MS, "model", 2, 2, 3, "fixed"),
        LookedUp(40 * MS, "a", "hit", 2),
        VerifySent(40 * MS, "a", 3, 3, 6, 3, 1),
        VerdictReceived(60 * MS, "a", 3, 20 * MS, "model", 1, 1, 2, "fixed"),
    ]


def test_miss_is_told_with_its_cause_and_the_proposal_that_follows() -> None:
    told = traced(RandomGuesser(MODEL), 8, overlap="ahead", num_speculative_tokens=3)
    missed = [event for event in told if type(event) is LookedUp]
    assert {event.result for event in missed} == {"miss_token", "miss_count"}
    after = told[told.index(missed[0]) + 1]
    assert type(after) is DraftAsked and after.fanout == () and after.ns == missed[0].ns


def asked(**options: object) -> list[DraftAsked]:
    events = traced(PerfectGuesser(MODEL), 60, **options)
    return [event for event in events if isinstance(event, DraftAsked)]


def test_what_bounds_the_draft_is_told() -> None:
    bounded = asked(overlap="serial")
    assert any(0 < event.min_acceptance < 1 for event in bounded)
    assert {event.max_branches for event in bounded} == {0}
    outcomes = [event for event in asked(overlap="enumerate", num_speculative_tokens=2) if event.fanout]
    widths = {event.max_branches / len(event.fanout) for event in outcomes}
    assert widths and widths <= {1.0, 2.0, 3.0}
    assert {event.min_acceptance for event in outcomes} == {0.0}


def test_nothing_of_what_is_said_is_in_it() -> None:
    text = encode_trace(traced(PerfectGuesser(MODEL), 6, overlap="enumerate", num_speculative_tokens=2))
    assert "token_ids" not in text
    assert str(list(PROMPT)) not in text


def test_only_the_last_events_are_kept() -> None:
    trace = Trace(VirtualClock(), 3)
    for index in range(5):
        trace.draft_skipped(str(index))
    assert [event.request_id for event in trace.events] == ["2", "3", "4"]


async def test_without_room_for_events_there_is_no_trace(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        await pair.router.complete(request())
        assert await pair.router.trace_text() is None


def test_every_event_survives_the_way_through_text() -> None:
    assert decode_trace(encode_trace(EVENTS)) == EVENTS
    assert encode_trace(EVENTS).count("\n") == len(EVENTS)


@pytest.mark.parametrize(
    "line", ["x", "[]", "{}", '{"event": "other"}', '{"event": "looked_up", "ns": 1}', "7"]
)
def test_a_line_that_is_no_event_is_named(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_trace(encode_trace(EVENTS) + line + "\n")
    assert str(caught.value) == f"line {len(EVENTS) + 1} is no event of a trace: {line!r}"


async def test_trace_over_http_and_404_without_one() -> None:
    router = FakeRouterClient(info=http_service.INFO)
    async with http_service.serving(router) as service:
        async with service.http.get("/debug/trace") as response:
            assert response.status == 404
            body = await response.json()
            assert body["error"]["message"] == (
                "GET /debug/trace: nothing is traced; set router.trace_events"
            )
        router.trace = encode_trace(EVENTS)
        async with service.http.get("/debug/trace") as response:
            assert response.status == 200
            assert decode_trace(await response.text()) == EVENTS
