"""What leaves the router with a round, and who is told of it when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specray.errors import EngineLostError
from specray.fakes import LocalDrafter, VirtualClock
from specray.interfaces import Clock, SyncDraftEngine
from specray.router.deferred import Later
from specray.router.live_session import LiveSession
from specray.router.rounds import Rounds
from specray.types import SpeculateItem
from tests.unit.router.harness import begin_at_once, fake_draft, request, serving


class NotedDrafter(LocalDrafter):
    """Notes what each message asks, what it frees, and whose callers had their output by then."""

    def __init__(self, engine: SyncDraftEngine, clock: Clock, ended: Sequence[str]) -> None:
        super().__init__(engine, clock)
        self.messages: list[tuple[list[str], list[str], list[str]]] = []
        self._ended = ended

    def note(self, items: Sequence[SpeculateItem], released: Sequence[str]) -> None:
        self.messages.append(([item.request_id for item in items], list(released), list(self._ended)))

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        self.note(items, released)
        await super().release(released)
        await super().speculate(items)

    async def release(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self.note((), request_ids)
        await super().release(request_ids)


async def test_end_of_a_session_goes_with_the_next_round_and_before_its_caller_is_told(
    clock: VirtualClock,
) -> None:
    draft = fake_draft()
    ended: list[str] = []
    drafter = NotedDrafter(draft, clock, ended)

    async with serving(
        clock,
        draft=draft,
        make_drafter=lambda _: drafter,
        overlap="serial",
        num_speculative_tokens=2,
    ) as pair:
        short, long = request("short", max_tokens=6), request("long", max_tokens=60)
        for task in await begin_at_once(pair, ended, short, long):
            await task
        await pair.settle()
    assert ended == ["short", "long"]
    [(asked, released, told)] = [message for message in drafter.messages if "short" in message[1]]
    assert (asked, released, told) == (["long"], ["short"], [])
    # Nobody is left to ask for.
    assert [message for message in drafter.messages if "long" in message[1]] == [([], ["long"], ["short"])]


async def test_request_that_has_ended_is_told_though_the_loop_fails_in_the_same_step(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = Rounds.schedule

    def fail_without_short(rounds: Rounds, *, has_grace: bool) -> list[tuple[LiveSession, int]]:
        if len(rounds.sessions) and "short" not in rounds.sessions:
            raise RuntimeError("a bug")
        return schedule(rounds, has_grace=has_grace)

    monkeypatch.setattr(Rounds, "schedule", fail_without_short)

    ended: list[str] = []
    async with serving(clock, num_speculative_tokens=0) as pair:
        pairs = request("short", max_tokens=6), request("long", max_tokens=60)
        short, long = await begin_at_once(pair, ended, *pairs)
        await asyncio.wait_for(short, 10.0)
        assert ended == ["short"]
        with pytest.raises(EngineLostError, match="the router failed: a bug"):
            await long


def test_what_is_put_off_behind_a_failure_is_kept() -> None:
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("broken")

    later = Later()
    for call in (lambda: done.append(1), fail, lambda: done.append(2)):
        later.add(call)
    with pytest.raises(RuntimeError, match="broken"):
        later.run()
    assert done == [1] and later
    later.run()
    assert done == [1, 2] and not later
