"""A target that is lost comes back, or is given up: the router's side in virtual time, and the group's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from specray.actors.targets.source import PROBE_TIMEOUT_S, TargetSource
from specray.engine_info import EngineInfo, StepTime
from specray.errors import ConfigError, EngineLostError
from specray.fakes import FakeTarget, LocalVerifier, VirtualClock
from specray.interfaces import Verifier
from specray.requests import OutputChunk
from specray.router.in_flight import VerifyInFlight
from specray.router.rounds import Rounds
from tests.unit.router.harness import TARGET_S, expected, fake_target, request, router_config, serving


async def texts(chunks: AsyncIterator[OutputChunk]) -> tuple[int, ...]:
    return sum([chunk.token_ids async for chunk in chunks], ())


def connecting(
    target: FakeTarget, clock: VirtualClock, *, after_s: float = 0.0, error: Exception | None = None
) -> tuple[list[LocalVerifier], Callable[[], Coroutine[Any, Any, Verifier]]]:
    """The connections to a target, and what makes the next: again only after so long, or never."""
    made: list[LocalVerifier] = []

    async def connect() -> Verifier:
        if made and error is not None:
            raise error
        if made:
            await asyncio.sleep(after_s)
        made.append(LocalVerifier(target, clock))
        return made[-1]

    return made, connect


async def test_sessions_pause_while_the_target_starts_anew_and_none_fails(clock: VirtualClock) -> None:
    target = fake_target()
    made, connect = connecting(target, clock, after_s=100.0)
    config = router_config(start_timeout_s=120, request_timeout_s=1000)
    async with serving(clock, target=target, verifier=connect, config=config) as pair:
        router = pair.router
        before = [request(str(index), (index, 7), 200) for index in range(3)]
        streams = [asyncio.create_task(texts(router.stream(each))) for each in before]
        await asyncio.sleep(0.5)
        target.forget()
        made[0].lose()
        await asyncio.sleep(1.0)
        late = request("late", (9, 9), 50)
        streams.append(asyncio.create_task(texts(router.stream(late))))
        await asyncio.sleep(50.0)
        assert router.failure is None
        with pytest.raises(EngineLostError, match="started anew"):
            await router.check_ready()
        outputs = await asyncio.gather(*streams)
        assert outputs == [expected(each) for each in (*before, late)]
        assert 100 < clock.monotonic() < 120
        await router.check_ready()
        assert pair.counted("specray_target_lost_total") == 1
        await pair.settle()


async def test_nothing_is_done_without_a_target_for_what_had_no_room_in_the_lost_one(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fake_target()
    made, connect = connecting(target, clock, after_s=20.0)
    async with serving(clock, target=target, verifier=connect, num_speculative_tokens=0) as pair:
        target.fail_next("a", "no room", is_retriable=True)
        call = asyncio.create_task(pair.router.complete(request("a", max_tokens=4)))
        await asyncio.sleep(1.5 * TARGET_S)
        assert pair.counted("specray_preemptions_total") == 1
        made[0].lose()
        await asyncio.sleep(1.0)
        num_turns = 0
        collect = Rounds.collect

        def counting(rounds: Rounds, verifying: VerifyInFlight | None) -> VerifyInFlight | None:
            nonlocal num_turns
            num_turns += 1
            return collect(rounds, verifying)

        monkeypatch.setattr(Rounds, "collect", counting)
        await asyncio.sleep(10.0)
        assert num_turns == 0
        assert (await call).token_ids == expected(request("a", max_tokens=4))
        # It goes on as soon as there is a target again.
        assert clock.monotonic() == pytest.approx(1.5 * TARGET_S + 20.0 + 4 * TARGET_S, abs=0.001)
        await pair.settle()


async def test_a_target_that_does_not_come_back_is_given_up_after_start_timeout(clock: VirtualClock) -> None:
    target = fake_target()
    made, connect = connecting(target, clock, error=EngineLostError("no node"))
    config = router_config(start_timeout_s=30)
    async with serving(clock, target=target, verifier=connect, config=config) as pair:
        call = asyncio.create_task(pair.router.complete(request(max_tokens=1000)))
        await asyncio.sleep(0.5)
        made[0].lose()
        with pytest.raises(EngineLostError, match="the target was lost: no node"):
            await call
        assert 15 < clock.monotonic() <= 31
        assert "no node" in str(pair.router.failure)
        with pytest.raises(EngineLostError, match="lost"):
            await pair.router.complete(request("b"))
        with pytest.raises(EngineLostError):
            await pair.router.check_ready()


async def test_a_wrong_setting_is_given_up_at_once(clock: VirtualClock) -> None:
    target = fake_target()
    made, connect = connecting(target, clock, error=ConfigError("the model is gone"))
    async with serving(clock, target=target, verifier=connect) as pair:
        made[0].lose()
        await asyncio.sleep(0.01)
        assert "the model is gone" in str(pair.router.failure)


class UnmeasuredVerifier(LocalVerifier):
    """Is asked for its round trip, and hangs or breaks."""

    def __init__(self, target: FakeTarget, clock: VirtualClock, error: Exception | None) -> None:
        super().__init__(target, clock)
        self._error = error
        self.is_closed = False

    async def fetch_info(self) -> EngineInfo:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(1.0)
        return self.info

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


@pytest.mark.parametrize("error", [None, RuntimeError("broken")], ids=["stop", "error"])
async def test_a_new_target_is_closed_when_its_measuring_is_interrupted(
    clock: VirtualClock, error: Exception | None
) -> None:
    target = fake_target()
    first: list[LocalVerifier] = []
    made: list[UnmeasuredVerifier] = []

    async def connect() -> Verifier:
        if not first:
            first.append(LocalVerifier(target, clock))
            return first[-1]
        if made:
            raise EngineLostError("no node")
        made.append(UnmeasuredVerifier(fake_target(step_times=(StepTime(1, 0.01),)), clock, error))
        return made[-1]

    async with serving(clock, target=target, verifier=connect) as pair:
        first[0].lose()
        await asyncio.sleep(0.5)
        with pytest.raises(EngineLostError, match="started anew"):
            await pair.router.check_ready()
    assert [verifier.is_closed for verifier in made] == [True]


async def test_drain_ends_what_is_not_finished_at_its_deadline(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        short = asyncio.create_task(pair.router.complete(request("short", max_tokens=50)))
        long = asyncio.create_task(pair.router.complete(request("long", max_tokens=4000)))
        await asyncio.sleep(0.1)
        await pair.router.stop(drain=True, drain_timeout_s=3.0)
        assert clock.monotonic() == pytest.approx(3.1, abs=0.1)
        assert (await short).token_ids == expected(request("short", max_tokens=50))
        with pytest.raises(EngineLostError, match="may be sent again"):
            await long


class FakeGroup:
    """Ranks that start in a second, do steps while they may, and end when told."""

    def __init__(self, clock: VirtualClock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails
        self._end = asyncio.Event()
        self.is_hanging = False
        self.is_running = False
        self.is_ended_in_order = False
        self.num_checks = 0

    async def start(self) -> str:
        await self._clock.sleep(1.0)
        if self._fails:
            raise EngineLostError("rank 1 did not start")
        self.is_running = True
        return f"unix:/{id(self)}"

    async def ended(self) -> str:
        await self._end.wait()
        return "rank 1 ended"

    async def check(self) -> None:
        self.num_checks += 1
        if self.is_hanging:
            await self._clock.sleep(1e6)
        if not self.is_running:
            raise EngineLostError("rank 0 is gone")

    def stop(self) -> None:
        self.is_running = False

    async def end(self) -> None:
        self.is_ended_in_order = True
        self.stop()

    def lose_a_rank(self) -> None:
        self._end.set()


class Site:
    """A source with the groups it has made; ``failing`` of the next ones do not start."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.groups: list[FakeGroup] = []
        self.connected: list[str] = []
        self.num_failing = 0
        self.refuses = False
        self.source = TargetSource(self._make, self._connect, clock=clock)

    def _make(self) -> FakeGroup:
        assert not any(group.is_running for group in self.groups), "two groups at a time"
        self.num_failing -= 1
        self.groups.append(FakeGroup(self.clock, fails=self.num_failing >= 0))
        return self.groups[-1]

    async def _connect(self, address: str) -> Verifier:
        if self.refuses:
            raise EngineLostError("nobody answers")
        self.connected.append(address)
        return LocalVerifier(fake_target(), self.clock)


async def test_a_whole_group_is_connected_again_and_not_started_anew(clock: VirtualClock) -> None:
    site = Site(clock)
    await site.source.connect()
    await site.source.connect()
    assert (len(site.groups), site.groups[0].num_checks) == (1, 1)
    assert site.connected == [f"unix:/{id(site.groups[0])}"] * 2
    site.source.stop()
    site.source.stop()
    assert not site.groups[0].is_running


async def test_a_group_that_is_not_needed_any_more_is_ended_in_order_and_one_that_hangs_is_not_asked(
    clock: VirtualClock,
) -> None:
    site = Site(clock)
    await site.source.end()
    await site.source.connect()
    site.groups[0].is_hanging = True
    await site.source.connect()
    await site.source.end()
    await site.source.end()
    assert [group.is_running for group in site.groups] == [False, False]
    assert [group.is_ended_in_order for group in site.groups] == [False, True]


async def test_a_rank_that_ends_takes_the_others_with_it_before_anybody_asks(clock: VirtualClock) -> None:
    site = Site(clock)
    await site.source.connect()
    site.groups[0].lose_a_rank()
    await clock.sleep(0.001)
    assert not site.groups[0].is_running
    await site.source.connect()
    assert [group.is_running for group in site.groups] == [False, True]
    assert site.groups[0].num_checks == 0, "what has ended needs no probe"
    site.source.stop()


async def test_a_group_that_hangs_is_ended_after_one_probe(clock: VirtualClock) -> None:
    site = Site(clock)
    await site.source.connect()
    site.groups[0].is_hanging = True
    await site.source.connect()
    assert clock.monotonic() == pytest.approx(1.0 + PROBE_TIMEOUT_S + 1.0)
    assert [group.is_running for group in site.groups] == [False, True]
    site.source.stop()


async def test_a_group_that_does_not_start_or_answer_is_followed_by_another(clock: VirtualClock) -> None:
    site = Site(clock)
    site.num_failing = 1
    with pytest.raises(EngineLostError, match="did not start"):
        await site.source.connect()
    site.refuses = True
    with pytest.raises(EngineLostError, match="nobody answers"):
        await site.source.connect()
    assert not any(group.is_running for group in site.groups)
    site.refuses = False
    await site.source.connect()
    assert [group.is_running for group in site.groups] == [False, False, True]
    site.source.stop()
