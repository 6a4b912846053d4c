"""Tests of simulated engines at the protocol: lengths, room, late sequences, and shared drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from specray.draft_tokens import DraftTokens
from specray.errors import EngineLostError
from specray.fakes import VirtualClock
from specray.planning.profile import AcceptanceProfile, RouterProfile
from specray.planning.simulation.busy import Busy, SharedStep
from specray.planning.simulation.draft import SimulatedDraft, SimulatedDrafterSource
from specray.planning.simulation.scripts import GUESS, Scripts
from specray.planning.simulation.target import RequestTimes, SimulatedTarget
from specray.planning.simulation.times import SimulatedDraftTimes, SimulatedTargetTimes
from specray.types import (
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    TargetReply,
    UnknownSequence,
    Verdict,
    VerifyItem,
)
from tests.unit.planning.parts import (
    PREFILL_S,
    PROPOSE_S,
    VERIFY_S,
    acceptance,
    draft,
    linear,
    output,
    replayed,
    target,
)


def virtual(test: Callable[[VirtualClock], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test in virtual time."""

    @wraps(test)
    def run() -> None:
        clock = VirtualClock()
        clock.run(test(clock))

    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def make_target(requests: dict[str, RequestTimes] | None = None, **changes: Any) -> SimulatedTarget:
    """Makes a target that accepts every draft token."""
    profile = target(**changes)
    return SimulatedTarget(
        profile.info("target"),
        SimulatedTargetTimes(profile),
        router=RouterProfile(),
        scripts=Scripts(acceptance(1.0)),
        rng=random.Random(1),
        requests={} if requests is None else requests,
    )


def make_draft(measured: AcceptanceProfile | None = None, **changes: Any) -> SimulatedDraft:
    profile = draft(**changes)
    return SimulatedDraft(
        profile.info("draft"),
        SimulatedDraftTimes(profile),
        router=RouterProfile(),
        scripts=Scripts(acceptance(1.0) if measured is None else measured),
    )


def prompt(request_id: str, num_tokens: int, **more: Any) -> VerifyItem:
    sampling = SamplingParams(num_prompt_tokens=num_tokens)
    return VerifyItem(request_id, 1, 0, (0,) * num_tokens, sampling=sampling, **more)


async def answers(engine: SimulatedTarget, *items: VerifyItem) -> tuple[TargetReply, ...]:
    await engine.verify(items)
    return (await engine.replies()).replies


@virtual
async def test_target_verifies_what_it_holds(clock: VirtualClock) -> None:
    engine = make_target()
    assert await answers(engine, prompt("a", 5)) == (Verdict("a", 1, 0, 0, GUESS),)
    assert clock.monotonic() == pytest.approx(PREFILL_S)
    assert await answers(engine, VerifyItem("a", 2, 5, (1,), DraftTokens((1, 1)))) == (
        Verdict("a", 2, 5, 2, GUESS),
    )
    assert clock.monotonic() == pytest.approx(PREFILL_S + VERIFY_S)


@virtual
async def test_accepted_draft_tokens_are_told_again_and_computed_once(clock: VirtualClock) -> None:
    async def rows(engine: SimulatedTarget, *items: VerifyItem) -> int | None:
        await engine.verify(items)
        return (await engine.replies()).num_rows

    engine = make_target()
    assert await rows(engine, prompt("a", 5)) == 5
    assert await rows(engine, VerifyItem("a", 2, 5, (1,), DraftTokens((1, 1)))) == 3
    # Two accepted ones and what came after them, of which only that is new, and a draft token.
    assert await rows(engine, VerifyItem("a", 3, 6, (1, 1, 1), DraftTokens((1,)))) == 2
    assert await rows(engine, prompt("a", 5)) == 5, "it starts over"


@virtual
async def test_target_says_what_it_does_not_hold(clock: VirtualClock) -> None:
    engine = make_target()
    assert await answers(engine, VerifyItem("a", 1, 5, (1,))) == (UnknownSequence("a", 1, 5),)
    await answers(engine, prompt("a", 5))
    await engine.release(["a", "never seen"])
    assert await answers(engine, VerifyItem("a", 2, 5, (1,))) == (UnknownSequence("a", 2, 5),)


@virtual
async def test_chunk_is_cut_behind_its_room_and_says_how_much_is_held(clock: VirtualClock) -> None:
    engine = make_target()
    (reply,) = await answers(engine, prompt("a", 99, sample=False, max_new_tokens=40))
    assert reply == Verdict("a", 1, 0, 0, None, held_len=40)
    (rest,) = await answers(engine, VerifyItem("a", 2, 40, (0,) * 60))
    assert isinstance(rest, Verdict) and rest.next_token_id == GUESS


@virtual
async def test_target_without_room_says_so_and_has_it_again(clock: VirtualClock) -> None:
    engine = make_target(num_blocks=4)
    assert isinstance((await answers(engine, prompt("a", 40)))[0], Verdict)
    (full,) = await answers(engine, prompt("b", 17))
    assert isinstance(full, ItemFailed) and full.is_retriable
    await engine.release(["a"])
    assert isinstance((await answers(engine, prompt("b", 17)))[0], Verdict)


@virtual
async def test_requests_learn_when_their_tokens_came(clock: VirtualClock) -> None:
    times = RequestTimes()
    engine = make_target({"a": times}, transport=linear(0.004))
    await answers(engine, prompt("a", 5))
    await answers(engine, VerifyItem("a", 2, 5, (1,), DraftTokens((1, 1, 1))))
    assert times.first_s == pytest.approx(0.004 + PREFILL_S)
    assert times.gaps == [(pytest.approx((0.004 + VERIFY_S) / 4), 4)]


@virtual
async def test_a_prompt_waits_longer_and_rounds_do_not(clock: VirtualClock) -> None:
    times = RequestTimes()
    engine = make_target({"a": times}, transport=linear(0.004), prompt_wait_s=0.1)
    await answers(engine, prompt("a", 5))
    await answers(engine, VerifyItem("a", 2, 5, (1,), DraftTokens((1, 1, 1))))
    assert times.first_s == pytest.approx(0.1 + 0.004 + PREFILL_S)
    assert times.gaps == [(pytest.approx((0.004 + VERIFY_S) / 4), 4)]


@virtual
async def test_draft_takes_all_that_waits_into_one_step(clock: VirtualClock) -> None:
    shared = make_draft()
    one, two, three = (shared.connect() for _ in range(3))
    for connection in (one, two, three):
        await connection.speculate([SpeculateItem("a", 1, 0, (0,), 2)])
    first, second, third = await asyncio.gather(one.replies(), two.replies(), three.replies())
    assert (
        first.replies
        == second.replies
        == third.replies
        == (Proposal("a", 1, 0, DraftTokens((GUESS, GUESS))),)
    )
    # The first goes at once, the two others wait for its end and go together.
    assert clock.monotonic() == pytest.approx(2 * PROPOSE_S)
    assert shared.busy.num_steps == 2


@virtual
async def test_equal_request_ids_of_two_routers_are_two_sequences(clock: VirtualClock) -> None:
    shared = make_draft()
    one, two = shared.connect(), shared.connect()
    await one.speculate([SpeculateItem("a", 1, 0, (0,) * 9, 2)])
    await one.replies()
    await two.speculate([SpeculateItem("a", 1, 9, (1,), 2)])
    assert (await two.replies()).replies == (UnknownSequence("a", 1, 9),)


@virtual
async def test_draft_forgets_the_sequence_used_longest_ago(clock: VirtualClock) -> None:
    connection = make_draft(max_num_seqs=2).connect()
    for name in ("a", "b", "a", "c"):
        await connection.speculate([SpeculateItem(name, 1, 0, (0,), 1)])
        await connection.replies()
    await connection.speculate([SpeculateItem(name, 2, 1, (1,), 1) for name in ("a", "b", "c")])
    kinds = [type(reply) for reply in (await connection.replies()).replies]
    assert kinds == [Proposal, UnknownSequence, Proposal]


@virtual
async def test_outcomes_have_as_many_ranks_as_there_is_room(clock: VirtualClock) -> None:
    connection = make_draft().connect()
    item = SpeculateItem("a", 1, 0, (0,), 2, (1, 1), (8, 8, 8), max_branches=6)
    await connection.speculate([item])
    (outcomes,) = (await connection.replies()).replies
    assert isinstance(outcomes, Outcomes)
    assert [(one.num_accepted_tokens, one.next_token_id) for one in outcomes.branches] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


@virtual
async def test_leases_go_to_the_draft_with_the_fewest_routers(clock: VirtualClock) -> None:
    drafts = [make_draft(), make_draft()]
    source = SimulatedDrafterSource(drafts)
    leased = [await source.lease() for _ in range(3)]
    assert [one.num_connections for one in drafts] == [2, 1]
    await leased[0].close()
    await leased[2].close()
    assert [one.num_connections for one in drafts] == [0, 1]
    await source.lease()
    assert [one.num_connections for one in drafts] == [1, 1]
    with pytest.raises(EngineLostError):
        await leased[0].replies()
    with pytest.raises(EngineLostError, match="there is no draft"):
        await SimulatedDrafterSource([]).lease()


@virtual
async def test_draft_step_ends_with_its_longest_line_and_lines_that_ended_early_leave_it(
    clock: VirtualClock,
) -> None:
    short = {"min_acceptance": 0.5, "by_position": "1111"}
    measured = replayed(output("1111", prompt=(1,), lengths=[short]))
    points = [(1, 1, 0.001), (1, 5, 0.005), (2, 1, 0.002), (2, 5, 0.010)]
    propose = [{"num_sequences": n, "num_tokens": k, "seconds": s} for n, k, s in points]
    connection = make_draft(measured, propose=propose).connect()
    asked = [
        SpeculateItem(name, 1, 0, (1,), 5, sampling=SamplingParams(num_prompt_tokens=1), min_acceptance=bound)
        for name, bound in (("a", 0.0), ("b", 0.5))
    ]
    await connection.speculate(asked)
    replies = (await connection.replies()).replies
    lengths = [len(one.draft.token_ids) for one in replies if isinstance(one, Proposal)]
    assert lengths == [5, 1]
    # Two lines for two steps: the token before which the second one ended was drafted too; then one.
    assert clock.monotonic() == pytest.approx(0.004 + 0.003 + 1e-9, rel=1e-5)


@virtual
async def test_steps_take_what_single_steps_took(clock: VirtualClock) -> None:
    engine = make_target(step_spread=[0.5, 1.5], transport=linear(0.002), transport_spread=[0.5, 1.5])
    await answers(engine, prompt("a", 5))
    seen = set()
    for round_id in range(2, 60):
        before_s = clock.monotonic()
        await answers(engine, VerifyItem("a", round_id, 5, (1,)))
        seen.add(round(1e3 * (clock.monotonic() - before_s), 3))
    assert seen == {round(10 * step + 2 * way, 3) for step in (0.5, 1.5) for way in (0.5, 1.5)}


@virtual
async def test_an_engine_beside_another_makes_up_for_what_it_lost_while_that_worked(
    clock: VirtualClock,
) -> None:
    other = Busy()
    shared = make_draft(slowdown_beside_target=2.0)
    shared.beside = other
    connection = shared.connect()
    other.work(0.0, 1.5 * PROPOSE_S)
    await connection.speculate([SpeculateItem("a", 1, 0, (0,), 2)])
    (reply,) = (await connection.replies()).replies
    assert isinstance(reply, Proposal)
    # 1.5 of its time beside the other are worth 0.75; the last quarter it has for itself.
    assert clock.monotonic() == pytest.approx(1.75 * PROPOSE_S, rel=1e-3)
    before_s = clock.monotonic()
    await connection.speculate([SpeculateItem("a", 2, 1, (0,), 2)])
    await connection.replies()
    assert clock.monotonic() - before_s == pytest.approx(PROPOSE_S, rel=1e-3)

    target = make_target(slowdown_beside_draft=2.0)
    target.beside = other
    before_s = clock.monotonic()
    other.work(before_s, before_s + 1.5 * PREFILL_S)
    await answers(target, prompt("a", 5))
    # Prompts have a slowdown of their own.
    assert clock.monotonic() - before_s == pytest.approx(PREFILL_S)
    before_s = clock.monotonic()
    other.work(before_s, before_s + 1.5 * VERIFY_S)
    await answers(target, VerifyItem("a", 2, 5, (1,)))
    assert clock.monotonic() - before_s == pytest.approx(1.75 * VERIFY_S, rel=1e-3)


def test_a_step_that_lost_time_keeps_its_engine_busy_for_so_long_and_is_looked_at_once() -> None:
    own, other = Busy(), Busy()
    own.work(0.0, 1.0)
    other.work(0.25, 0.75)
    shared = SharedStep(1.0, other.worked_s(0.0), slowdown=2.0)
    assert shared.make_up(own, other, 1.0) == pytest.approx(0.25)
    assert (own.until_s, own.seconds, shared.seconds) == pytest.approx((1.25, 1.25, 1.25))
    assert shared.make_up(own, other, 1.25) == 0.0
    assert own.until_s == pytest.approx(1.25)
