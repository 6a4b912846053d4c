"""Tests of how a group of ranks notices that one of their processes hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from specray.actors.targets.group import PlacedRanks
from specray.actors.targets.place import RankProcess
from specray.actors.targets.ranks import TargetRank
from specray.config import parse_config
from specray.fakes import VirtualClock


class Call:
    """Stands in for a method of an actor."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.remote = run


class FakeRank:
    """An actor whose calls number ``hangs`` do not come back, and those numbered ``gone`` fail."""

    def __init__(self, *, hangs: range = range(0), gone: range = range(0)) -> None:
        self.num_calls = 0
        self.hangs, self.gone = hangs, gone
        self.process = Call(self._process)
        self.wait = Call(self._wait)
        self.end: asyncio.Future[str] | None = None

    async def _process(self) -> RankProcess:
        self.num_calls += 1
        if self.num_calls in self.hangs:
            await asyncio.Event().wait()
        if self.num_calls in self.gone:
            raise ray.exceptions.RayActorError
        return RankProcess("node", 7)

    async def _wait(self) -> str:
        self.end = asyncio.get_running_loop().create_future()
        return await self.end


def ended(*ranks: FakeRank, after_s: float | None = None) -> tuple[str, float]:
    """Returns the reason for the end and its time; ``after_s``: the first rank ends by itself then."""
    clock = VirtualClock()
    group: Any = None
    placed = PlacedRanks(parse_config({}), TargetRank, group)
    placed.actors = list(ranks)

    async def run() -> tuple[str, float]:
        task = asyncio.create_task(placed.ended())
        if after_s is not None:
            await clock.sleep(after_s)
            assert ranks[0].end is not None
            ranks[0].end.set_result("its engine is broken")
        return await task, clock.monotonic()

    return clock.run(run())


def test_a_rank_that_does_not_answer_three_times_in_a_row_hangs() -> None:
    reason = "a rank of the target has not answered 3 times in a row"
    assert ended(FakeRank(), FakeRank(hangs=range(11, 100))) == (reason, 10 + 3 * (1 + 4))


def test_two_silences_an_answer_and_a_rank_that_is_gone_are_no_hang() -> None:
    rank = FakeRank(hangs=range(2, 4), gone=range(6, 20))
    other = FakeRank(hangs=range(30, 32))
    assert ended(rank, other, after_s=200.0) == ("target rank 0 ended: its engine is broken", 200.0)
    assert rank.num_calls > 150
