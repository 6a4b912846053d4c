"""Looking for repetitions takes the router's time: sessions have a fallback where it brings more."""

from __future__ import annotations

from typing import Any

import pytest

from specray.control.controller import Controller
from specray.engine_info import StepTime
from specray.fakes import VirtualClock
from specray.requests import SpeculationParams
from specray.router.proposers.factory import LOOK_S, SESSIONS_PER_EXPLORATION, ProposerFactory
from specray.router.proposers.local import LocalProposer
from specray.router.session.session import Session
from specray.router.session.values import Commit
from specray.types import DraftKind
from tests.unit.router.harness import expected, factory, request, serving, speculation_config

STEP_S = 0.02
"""Of any number of rows."""


def look(fallback: LocalProposer, num_accepted: int, count: int = 1) -> None:
    """Rounds in which what a fallback found was verified, or nothing was."""
    verdict = Commit(
        (1,) * (num_accepted + 1),
        num_draft_tokens=num_accepted,
        num_accepted_tokens=num_accepted,
        source=fallback.source,
        depth=num_accepted,
    )
    session = Session(request(), None, vocab_size=64)
    for _ in range(count):
        if num_accepted:
            fallback.observe(session, verdict)
        else:
            fallback.pass_over()


def fallback_of(drafts: ProposerFactory, num_sessions: int = 1) -> LocalProposer:
    made = drafts.local(request(), DraftKind.MODEL, num_sessions=num_sessions)
    assert made is not None
    return made


def has_fallback(drafts: ProposerFactory) -> bool:
    """Of two sessions among 64, of which one may have a fallback to look again."""
    return all(drafts.local(request(), DraftKind.MODEL, num_sessions=64) is not None for _ in range(2))


def drafts_of(*, accepted: float) -> ProposerFactory:
    """After ten thousand looks that brought ``accepted`` tokens each."""
    config = speculation_config(fallback="ngram")
    controller = Controller(config)
    controller.cost_model.expect_target([StepTime(1, STEP_S), StepTime(64, STEP_S)], 0.0)
    drafts = factory(controller, fallback="ngram")
    fallback = fallback_of(drafts)
    for index in range(10_000):
        look(fallback, int((index + 1) * accepted) - int(index * accepted))
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
    assert not has_fallback(drafts)
    for _ in range(SESSIONS_PER_EXPLORATION):
        assert drafts.local(request(), DraftKind.NGRAM, num_sessions=64) is not None
    look(fallback_of(drafts), 4, count=200)
    assert has_fallback(drafts)


def test_look_whose_find_is_not_verified_brought_nothing() -> None:
    drafts = drafts_of(accepted=0.1)
    assert has_fallback(drafts)
    look(fallback_of(drafts), 0, count=10_000)
    assert not has_fallback(drafts)


def test_before_steps_were_measured_all_have_one() -> None:
    drafts = factory(fallback="ngram")
    look(fallback_of(drafts), 0, count=20_000)
    assert has_fallback(drafts)


async def test_router_counts_those_that_wait_too(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(clock, fallback="ngram") as pair:
        router = pair.router
        asked: list[int] = []
        local = ProposerFactory.local

        def counting(factory: ProposerFactory, *given: Any, num_sessions: int) -> LocalProposer | None:
            asked.append(num_sessions)
            return local(factory, *given, num_sessions=num_sessions)

        monkeypatch.setattr(ProposerFactory, "local", counting)
        streams = [router.stream(request(name, speculation=SpeculationParams())) for name in "abc"]
        given = request()
        for stream in streams:
            assert (await anext(stream)).token_ids[0] == expected(given)[0]
        assert asked == [1, 2, 3]
        for stream in streams:
            await stream.aclose()
