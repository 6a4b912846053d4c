"""Looking for repetitions takes the router's time: sessions have a fallback where it brings more."""

from __future__ import annotations

import pytest

from specray.control.controller import Controller
from specray.fakes import VirtualClock
from specray.requests import SpeculationParams
from specray.router.proposers.factory import LOOK_S, SESSIONS_PER_EXPLORATION, ProposerFactory
from specray.router.session.session import Session
from specray.router.session.values import Commit, Lookup
from specray.types import DraftKind, StepTime
from tests.unit.router.harness import expected, factory, request, serving, speculation_config

STEP_S = 0.02
"""Of any number of rows."""


def drafts_of(*, accepted: float) -> ProposerFactory:
    """After ten thousand looks that brought so many tokens each."""
    config = speculation_config(fallback="ngram")
    controller = Controller(config)
    controller.cost_model.expect_target([StepTime(1, STEP_S), StepTime(64, STEP_S)], 0.0)
    drafts = factory(controller, fallback="ngram")
    drafts._looks.add(round(10_000 * accepted), 10_000)
    return drafts


@pytest.mark.parametrize(
    ("num_sessions", "accepted", "has_ngram"),
    [
        (64, 1.1 * 64 * LOOK_S / STEP_S, True),
        (64, 0.6 * 64 * LOOK_S / STEP_S, False),
        (8, 0.6 * 64 * LOOK_S / STEP_S, True),
        (1, 0.0, True),
    ],
)
def test_fallback_is_worth_its_tokens_share_of_a_step(
    num_sessions: int, accepted: float, has_ngram: bool
) -> None:
    made = drafts_of(accepted=accepted).local(request(), DraftKind.MODEL, num_sessions=num_sessions)
    assert (made is not None) is has_ngram


def test_some_sessions_go_on_looking_where_it_does_not_pay() -> None:
    drafts = drafts_of(accepted=0.0)
    made = [
        drafts.local(request(), DraftKind.MODEL, num_sessions=64) for _ in range(4 * SESSIONS_PER_EXPLORATION)
    ]
    assert [index for index, one in enumerate(made, start=1) if one is not None] == [32, 64, 96, 128]


def test_every_round_with_a_fallback_is_a_look_and_who_asks_for_ngrams_has_them() -> None:
    drafts = drafts_of(accepted=0.0)
    before = drafts._looks.value
    fallback = drafts.local(request(), DraftKind.MODEL, num_sessions=1)
    assert fallback is not None
    asked = request()
    verdict = Commit((1,) * 5, (), 4, 4, 4, Lookup.NOT_ASKED, fallback.source, depth=4)
    fallback.observe(Session(asked, None, vocab_size=64), verdict)
    assert drafts._looks.value > before
    for _ in range(SESSIONS_PER_EXPLORATION):
        assert drafts.local(request(), DraftKind.NGRAM, num_sessions=64) is not None


def test_look_whose_find_is_not_verified_brought_nothing() -> None:
    drafts = drafts_of(accepted=1.0)
    before = drafts._looks.value
    fallback = drafts.local(request(), DraftKind.MODEL, num_sessions=1)
    assert fallback is not None
    fallback.pass_over()
    assert drafts._looks.value < before


def test_before_steps_were_measured_all_have_one() -> None:
    drafts = factory(fallback="ngram")
    drafts._looks.add(0, 100_000)
    assert drafts.local(request(), DraftKind.MODEL, num_sessions=64) is not None


async def test_router_counts_those_that_wait_too(clock: VirtualClock) -> None:

    async with serving(clock, fallback="ngram") as pair:
        router = pair.router
        asked: list[int] = []
        of = router._proposers.local
        router._proposers.local = lambda *given, num_sessions: (  # type: ignore[method-assign]
            asked.append(num_sessions),
            of(*given, num_sessions=num_sessions),
        )[1]
        streams = [router.stream(request(name, speculation=SpeculationParams())) for name in "abc"]
        given = request()
        for stream in streams:
            assert (await anext(stream)).token_ids[0] == expected(given)[0]
        assert asked == [1, 2, 3]
        for stream in streams:
            await stream.aclose()
