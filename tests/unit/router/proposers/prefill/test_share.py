"""How much the draft reads at once, and the share that each session has of it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel
from specray.control.state import Plan
from specray.draft_tokens import DraftTokens
from specray.engine_info import StepTime
from specray.router.draft_model.budgets import MIN_DRAFT_PREFILL_TOKENS, Budgets
from specray.router.draft_model.prefill import DraftPrefill
from specray.router.live_session import LiveSession
from specray.router.session.session import Session
from specray.types import Verdict
from tests.unit.router.harness import DRAFT_STEP_S, TARGET_S, budgets, request, speculation_config
from tests.unit.router.proposers.prefill.harness import LONG, SIZES, TOKEN_S

# How much at once


@pytest.mark.parametrize(
    ("most", "step_s", "most_s", "room"),
    [
        (512, TARGET_S, 1.0, 160),
        (100, TARGET_S, 1.0, 100),
        (512, TARGET_S, 0.014, 96),
        (512, 0.001, 1.0, MIN_DRAFT_PREFILL_TOKENS),
        (16, 0.001, 1.0, 16),
        (512, None, 1.0, 512),
    ],
)
def test_room_is_what_is_read_in_a_target_step_and_in_patience_but_not_less_than_a_little(
    most: int, step_s: float | None, most_s: float, room: int
) -> None:
    measured = CostModel()
    measured.draft.expect({size: DRAFT_STEP_S + TOKEN_S * (size - 1) for size in SIZES})
    if step_s is not None:
        measured.target.add(1, step_s)
    room_of = Budgets(measured, max_k=lambda: 7).draft_prefill_tokens
    assert room_of(most, num_rows=1, num_running=1, most_s=most_s) == room


def test_room_follows_the_target_step_of_those_who_run() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_draft(
        [StepTime(size, DRAFT_STEP_S + TOKEN_S * (size - 1)) for size in SIZES], 0.0
    )
    controller.cost_model.expect_target([StepTime(1, TARGET_S), StepTime(33, 2 * TARGET_S)], 0.0)
    rooms = [
        budgets(controller).draft_prefill_tokens(512, num_rows=rows, num_running=1, most_s=1.0)
        for rows in (1, 33)
    ]
    # In 40 ms 361, by size in whole blocks of rows.
    assert rooms == [160, 352]


def test_nothing_is_known_of_a_draft_so_that_nothing_bounds_what_it_reads() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_target([StepTime(1, TARGET_S)], 0.0)
    assert budgets(controller).draft_prefill_tokens(512, num_rows=1, num_running=1, most_s=1.0) == 512


# The share of a session


def live(name: str, num_tokens: int, *, num_read: int = 0) -> LiveSession:
    """A session with its first token, of whose prompt the draft has read so much."""
    given = request(name, LONG[:num_tokens], max_tokens=100)
    session = Session(given, None, vocab_size=64)
    item = session.verify_item(1000)
    session.on_verdict(Verdict(name, item.round_id, 0, 0, 9))
    session.draft.synced_len = num_read
    stats = Controller(speculation_config()).start_session(given)
    stats.plan = Plan(3)
    return LiveSession(session, cast("Any", None), stats, 0.0, 100.0)


def test_a_session_has_the_target_compute_its_last_token_and_what_is_drafted_once() -> None:
    given = request("a", LONG[:5], max_tokens=100)
    session = Session(given, None, vocab_size=64)
    one = LiveSession(
        session, cast("Any", None), Controller(speculation_config()).start_session(given), 0.0, 100.0
    )
    assert one.num_rows == 5
    session.on_verdict(Verdict("a", session.verify_item(1000).round_id, 0, 0, 9))
    assert one.num_rows == 1
    session.take_draft(DraftTokens((1, 2, 3)))
    assert one.num_rows == 4
    session.on_verdict(Verdict("a", session.verify_item(1000).round_id, 5, 2, 9))
    # It tells the two accepted ones again.
    assert (session.num_missing, one.num_rows - one.num_drafted) == (3, 1)


def reading_of(*sessions: LiveSession, is_draft_idle: bool = False) -> DraftPrefill:
    """160 tokens fit into a step of the target; 256 are read at once at most."""
    controller = Controller(speculation_config())
    controller.cost_model.expect_draft(
        [StepTime(size, DRAFT_STEP_S + TOKEN_S * (size - 1)) for size in SIZES], 0.0
    )
    controller.cost_model.expect_target([StepTime(size, TARGET_S) for size in SIZES], 0.0)
    return DraftPrefill(
        {one.request_id: one for one in sessions},
        budgets(controller),
        max_tokens=lambda: 256,
        patience_s=lambda: 1.0,
        is_draft_idle=lambda: is_draft_idle,
    )


def test_each_piece_without_an_answer_is_given_up_after_its_own_time() -> None:
    first, second, third = live("a", 300), live("b", 300), live("c", 300)
    reading = reading_of(first, second, third)
    for begun_s, one in ((1.0, first), (2.0, second), (2.5, third)):
        one.session.prefill_chunk_item(100)
        reading.note(one, begun_s)
    views = [one.session.draft for one in (first, second, third)]
    reading.expire(3.9, 3.0)
    assert [view.is_prefilling for view in views] == [True, True, True]
    reading.expire(4.0, 3.0)
    assert [view.is_prefilling for view in views] == [False, True, True]
    reading.expire(4.9, 3.0)
    assert [view.is_prefilling for view in views] == [False, True, True]
    # One that was answered meanwhile is nobody's loss.
    third.session.draft.in_flight = None
    reading.expire(5.0, 3.0)
    assert not any(view.is_prefilling for view in views)
    reading.expire(100.0, 3.0)
    assert not reading.is_going_on


def test_what_the_draft_is_reading_is_not_given_to_others() -> None:
    first, second = live("a", 300), live("b", 300)
    first.session.prefill_chunk_item(100)
    assert reading_of(first, second).share(second) == 156
    first.session.draft.lose()
    first.session.prefill_chunk_item(200)
    # 56 are left: it may as well wait for more.
    assert reading_of(first, second).share(second) == 0


def test_a_question_with_part_of_a_prompt_is_being_read_and_that_of_a_round_is_not() -> None:
    first, second = live("a", 50), live("b", 300)
    first.session.proposal_item(3)
    assert reading_of(first, second).share(second) == 256 - 51
    first.session.draft.lose()
    late = live("c", 300, num_read=201)
    late.session.proposal_item(3)
    assert reading_of(late, second).share(second) == 256 - 100
    first.session.draft.synced_len = 50
    first.session.proposal_item(3)
    assert reading_of(second, first, is_draft_idle=True).share(second) == 256


def test_prompts_that_go_before_everything_else_are_read_without_regard_for_others() -> None:
    company, reader = live("a", 5, num_read=5), live("b", 300)
    assert reading_of(company, reader).share(reader) == 160
    assert reading_of(company, reader, is_draft_idle=True).share(reader) == 256


@pytest.mark.parametrize(
    ("plan", "rest_rounds", "num_read"), [(None, 0, 5), (Plan(0), 0, 5), (Plan(3), 1, 5), (Plan(3), 0, 0)]
)
def test_who_is_not_drafted_for_is_no_company(plan: Plan | None, rest_rounds: int, num_read: int) -> None:
    other, reader = live("a", 5, num_read=num_read), live("b", 300)
    other.stats.plan, other.stats.rest_rounds = plan, rest_rounds
    assert reading_of(other, reader).share(reader) == 256


def test_in_company_each_step_of_the_target_has_its_share() -> None:
    company, reader = live("a", 5, num_read=5), live("b", 300)
    reading = reading_of(company, reader)
    for step, share in ((1, 160), (1, 0), (2, 160)):
        reading.begin()
        reading.begin_step(step)
        assert reading.share(reader) == share


def test_who_is_filled_in_by_the_target_is_no_company() -> None:
    other, reader = live("a", 5, num_read=5), live("b", 300)
    other.session.lose_target()
    assert reading_of(other, reader).share(reader) == 256


def test_questions_bring_what_there_is_room_for_and_in_company_a_little() -> None:
    company, reader, other = live("a", 5, num_read=5), live("b", 300, num_read=100), live("c", 60)
    alone = reading_of(reader, other)
    assert alone.can_ask(reader)
    # 201 and 61 tokens are more than 256.
    assert not alone.can_ask(other)
    alone.begin()
    assert alone.can_ask(other)
    reading = reading_of(company, reader, other)
    assert not reading.can_ask(live("d", 300, num_read=201))
    assert reading.can_ask(other)
    assert reading.can_ask(company)


def test_nobody_is_asked_before_it_has_read_its_piece() -> None:
    reader = live("a", 20)
    reader.session.prefill_chunk_item(21)
    assert not reading_of(reader).can_ask(reader)


@pytest.mark.parametrize(
    ("num_tokens", "num_read", "is_due"),
    [(20, 0, True), (300, 237, True), (20, 20, False), (300, 300, False)],
)
def test_prompts_are_read_and_what_a_round_brought_goes_with_its_question(
    num_tokens: int, num_read: int, is_due: bool
) -> None:
    one = live("a", num_tokens, num_read=num_read)
    assert reading_of(one).is_due(one) is is_due
    one.session.prefill_chunk_item(1)
    assert not reading_of(one).is_due(one)
