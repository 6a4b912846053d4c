"""How a router gets a draft, leaves one that ends, spreads over several, and goes on when drafts fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from specray.engine_info import EngineInfo, StepTime
from specray.errors import EngineLostError
from specray.fakes import FakeDraft, LocalDrafter, PerfectGuesser, VirtualClock
from specray.interfaces import Drafter
from specray.requests import OutputChunk, SpeculationParams
from specray.types import DraftReplies, SpeculateItem
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    chunks_of,
    complete,
    expected,
    fake_draft,
    fake_target,
    leasing,
    request,
    router_config,
    serving,
)


class LeavingDrafter(LocalDrafter):
    """Says that it will end, but answers until it does."""

    def __init__(self, engine: FakeDraft, clock: VirtualClock) -> None:
        super().__init__(engine, clock)
        self.is_closed = False

    def announce(self) -> None:
        self._wire.answer(DraftReplies((), 0, is_draining=True))

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


class Pool:
    """Drafts with a number of routers each; interfaces.DrafterPool."""

    def __init__(self, make: Callable[[int], Drafter], better: Sequence[int] = ()) -> None:
        self._make = make
        self._better = list(better)
        self.num_asked = 0
        self.leased: list[Drafter] = []

    async def lease(self) -> Drafter:
        self.leased.append(self._make(0))
        return self.leased[-1]

    async def lease_better(self, current: Drafter) -> Drafter | None:
        self.num_asked += 1
        assert current is self.leased[-1]
        if not self._better:
            return None
        self.leased.append(self._make(self._better.pop(0)))
        return self.leased[-1]


def tokens_of(timed: Sequence[tuple[float, OutputChunk]]) -> tuple[int, ...]:
    return sum((chunk.token_ids for _, chunk in timed), ())


def gaps_of(timed: Sequence[tuple[float, OutputChunk]]) -> list[float]:
    return [after[0] - before[0] for before, after in pairwise(timed)]


@pytest.mark.parametrize(
    ("info", "is_overlapped"),
    [({}, True), ({"hardware": ("one", "two")}, False), ({"lacks_outcomes": True}, False)],
)
async def test_a_draft_works_ahead_if_it_can_and_has_hardware_of_its_own(
    clock: VirtualClock, info: dict[str, Any], is_overlapped: bool
) -> None:
    target, draft = fake_target(hardware=("one",)), fake_draft(PerfectGuesser(MODEL), **info)
    async with serving(clock, target=target, draft=draft, num_speculative_tokens=3) as pair:
        await complete(pair, max_tokens=200)
        # The first follows the prompt, which both engines read at once.
        assert (pair.counted("specray_outcomes_total", result="hit") > 1) is is_overlapped


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
async def test_draft_that_will_end_is_left_without_a_round_alone(clock: VirtualClock, overlap: str) -> None:
    engines = [fake_draft(PerfectGuesser(MODEL)) for _ in range(2)]
    leased, lease = leasing(lambda number: LeavingDrafter(engines[number], clock))
    config = router_config(stream_interval_ms=0)
    async with serving(
        clock, make_drafter=lease, config=config, overlap=overlap, num_speculative_tokens=3
    ) as pair:
        given = request(max_tokens=200)
        call = asyncio.create_task(chunks_of(pair, given))
        await asyncio.sleep(0.5)
        leased[0].announce()
        leased[0].announce()
        timed = await call
        assert tokens_of(timed) == expected(given)
        # Once it runs, and before its end, every round has all its draft tokens: none was plain.
        assert {len(chunk.token_ids) for _, chunk in timed[2:-2]} == {4}
        assert pair.counted("specray_draft_moves_total") == 1
        assert pair.counted("specray_draft_lost_total") == 0
        assert pair.counted("specray_draft_connected") == 1
        assert [drafter.is_closed for drafter in leased] == [True, False]
        await asyncio.sleep(1.0)
        assert engines[1].held_request_ids == frozenset()


async def test_draft_that_ends_before_another_is_there_is_lost_as_any(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    leased, lease = leasing(lambda _: LeavingDrafter(draft, clock), missing=(1, 2))
    async with serving(
        clock, draft=draft, make_drafter=lease, overlap="ahead", num_speculative_tokens=3
    ) as pair:
        given = request(max_tokens=400)
        call = asyncio.create_task(pair.router.complete(given))
        await asyncio.sleep(0.5)
        leased[0].announce()
        await asyncio.sleep(0.2)
        leased[0].lose()
        draft.forget()
        assert (await call).token_ids == expected(given)
        assert pair.counted("specray_draft_lost_total") == 1
        assert pair.counted("specray_draft_moves_total") == 0
        assert len(leased) == 2


@pytest.mark.slow
async def test_router_moves_to_a_draft_that_fewer_routers_share(clock: VirtualClock) -> None:
    engines = [fake_draft(PerfectGuesser(MODEL)) for _ in range(2)]
    pool = Pool(lambda number: LocalDrafter(engines[number], clock), better=[1])
    async with serving(clock, drafters=pool, overlap="ahead", num_speculative_tokens=3) as pair:
        given = request(max_tokens=3000)
        assert (await pair.router.complete(given)).token_ids == expected(given)
        assert engines[1].num_steps > 0
        assert pair.counted("specray_draft_moves_total") == 1
        assert pair.counted("specray_draft_lost_total") == 0


class UnmeasuredDrafter(LeavingDrafter):
    """Is asked for its round trip, and hangs or breaks."""

    def __init__(self, engine: FakeDraft, clock: VirtualClock, error: Exception | None) -> None:
        super().__init__(engine, clock)
        self._error = error

    async def fetch_info(self) -> EngineInfo:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(1.0)
        return self.info


@pytest.mark.parametrize("error", [None, RuntimeError("broken")], ids=["stop", "error"])
async def test_draft_is_closed_when_its_measuring_is_interrupted(
    clock: VirtualClock, error: Exception | None
) -> None:
    draft = fake_draft(step_times=(StepTime(1, 0.01),))
    others = {0, *range(2, 100)}
    leased, lease = leasing(lambda _: UnmeasuredDrafter(draft, clock, error), missing=others)
    async with serving(clock, draft=draft, make_drafter=lease) as pair:
        await asyncio.sleep(0.5)
        assert pair.counted("specray_draft_leases_total") == 0
    assert [drafter.is_closed for drafter in leased] == [True]


async def test_pool_that_cannot_be_asked_costs_nothing(clock: VirtualClock) -> None:
    class Failing(Pool):
        async def lease_better(self, current: Drafter) -> Drafter | None:
            self.num_asked += 1
            raise EngineLostError("nobody answers")

    draft = fake_draft(PerfectGuesser(MODEL))
    pool = Failing(lambda _: LocalDrafter(draft, clock))
    async with serving(clock, draft=draft, drafters=pool, num_speculative_tokens=3) as pair:
        await asyncio.sleep(60.0)
        assert pool.num_asked >= 4
        given = request()
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert output.stats is not None and output.stats.num_spec_steps > 0


@pytest.mark.parametrize("wants", [False, True])
async def test_drafts_that_may_scale_to_none_are_asked_for_only_by_sessions(
    clock: VirtualClock, wants: bool
) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    leased, lease = leasing(lambda _: LocalDrafter(draft, clock))
    async with serving(
        clock, draft=draft, make_drafter=lease, draft_on_demand=True, num_speculative_tokens=3
    ) as pair:
        await asyncio.sleep(30.0)
        assert leased == []
        off = SpeculationParams() if wants else SpeculationParams(enabled=False)
        given = request(max_tokens=100, speculation=off)
        assert (await pair.router.complete(given)).token_ids == expected(given)
        await asyncio.sleep(30.0)
        assert len(leased) == wants


async def test_idle_router_lets_the_last_draft_scale_away(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    leased, lease = leasing(lambda _: LeavingDrafter(draft, clock))
    async with serving(
        clock, draft=draft, make_drafter=lease, draft_on_demand=True, num_speculative_tokens=3
    ) as pair:
        given = request(max_tokens=100)
        await pair.router.complete(given)
        await asyncio.sleep(30.0)
        leased[0].announce()
        await asyncio.sleep(5.0)
        leased[0].lose()
        await asyncio.sleep(30.0)
        assert len(leased) == 1
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert len(leased) == 2


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
@pytest.mark.parametrize(
    ("hangs_after", "most_s", "config"),
    [(0, 2.0, {}), (1, 2.0, {}), (20, 2.0, {}), (5, 2.0 + 2 * TARGET_S, {"round_timeout_s": 2.0})],
)
async def test_hanging_draft_costs_at_most_one_round_timeout_and_by_default_less_than_two_seconds(
    clock: VirtualClock, overlap: str, hangs_after: int, most_s: float, config: dict[str, float]
) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    _, lease = leasing(lambda _: LocalDrafter(draft, clock, hangs_after=hangs_after), missing=range(1, 100))
    async with serving(
        clock,
        make_drafter=lease,
        config=router_config(stream_interval_ms=0, **config),
        overlap=overlap,
        num_speculative_tokens=3,
    ) as pair:
        given = request(max_tokens=600)
        timed = await chunks_of(pair, given)
        assert tokens_of(timed) == expected(given)
        assert max([timed[0][0], *gaps_of(timed)]) < most_s
        assert sum(gap > 2 * TARGET_S for gap in gaps_of(timed)) <= 1
        assert pair.counted("specray_draft_lost_total") == 1


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
async def test_hanging_draft_is_given_up_though_every_request_is_short(
    clock: VirtualClock, overlap: str
) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    _, lease = leasing(lambda number: LocalDrafter(draft, clock, hangs_after=None if number else 4))
    async with serving(clock, make_drafter=lease, overlap=overlap, num_speculative_tokens=3) as pair:
        times: list[float] = []
        for number in range(40):
            started_s = clock.monotonic()
            given = request(str(number), max_tokens=12)
            output = await pair.router.complete(given)
            assert output.token_ids == expected(given)
            times.append(clock.monotonic() - started_s)
            await asyncio.sleep(0.1)
        assert sum(each > 13 * TARGET_S for each in times) == 1, "only one waited in vain"
        assert pair.counted("specray_draft_lost_total") == 1
        assert output.stats is not None and output.stats.num_spec_steps > 0


async def test_slow_draft_is_not_given_up_in_serial_rounds(clock: VirtualClock) -> None:
    draft = FakeDraft(PerfectGuesser(MODEL), cost=lambda steps: int(0.2e9))
    async with serving(
        clock,
        draft=draft,
        make_drafter=lambda _: LocalDrafter(draft, clock),
        overlap="serial",
        num_speculative_tokens=3,
    ) as pair:
        given = request(max_tokens=40)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert output.stats is not None and output.stats.num_spec_steps >= 10
        assert pair.counted("specray_draft_lost_total") == 0


async def test_request_that_ends_draft_after_draft_goes_on_without_one_and_others_with(
    clock: VirtualClock,
) -> None:
    class Poisoned(LocalDrafter):
        async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
            if any(item.request_id == "poison" for item in items):
                self.lose()
            await super().speculate(items, released)

    draft = fake_draft(PerfectGuesser(MODEL))
    leased, lease = leasing(lambda _: (draft.forget(), Poisoned(draft, clock))[1])
    async with serving(
        clock, draft=draft, make_drafter=lease, overlap="ahead", num_speculative_tokens=3
    ) as pair:
        poison, other = request("poison", max_tokens=300), request("other", max_tokens=300)
        first = asyncio.create_task(pair.router.complete(poison))
        await asyncio.sleep(3.0)
        output = await pair.router.complete(other)
        assert output.token_ids == expected(other)
        assert output.stats is not None and output.stats.num_spec_steps > 50
        assert (await first).token_ids == expected(poison)
        assert pair.counted("specray_draft_lost_total") == 3
        assert len(leased) == 4
