"""The owner of models and the uses at two Ingresses in virtual time, over applications that take time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from specray.errors import EngineLostError
from specray.fakes.clock import VirtualClock
from specray.loading.owner import ModelLoadError, ModelOwner, ModelUse
from specray.loading.table import ModelEntry, ModelState, ModelTable, Room
from specray.loading.uses import ModelUses


class Apps:
    """Applications of one byte each, which take 10 s to come and 2 s to go."""

    def __init__(self, room: float) -> None:
        self.room = room
        self.there: dict[str, ModelState] = {}
        self.events: list[str] = []
        self.problems: dict[str, ModelLoadError] = {}
        self.bytes: dict[str, int] = {}
        self.remembered: dict[str, int] = {}

    async def found(self) -> Mapping[str, ModelState]:
        return dict(self.there)

    async def load(self, name: str) -> None:
        self.events.append(f"load {name}")
        assert sum(other != name for other in self.there) < self.room, "no room for it"
        self.there[name] = ModelState.LOADING
        await asyncio.sleep(10)
        if name in self.problems:
            del self.there[name]
            raise self.problems[name]
        self.there[name] = ModelState.LOADED

    async def measure(self, name: str) -> int:
        return self.bytes.get(name, 0)

    async def remember(self, name: str, num_bytes: int) -> None:
        self.remembered[name] = num_bytes

    async def unload(self, name: str) -> None:
        self.events.append(f"unload {name}")
        self.there[name] = ModelState.DRAINING
        await asyncio.sleep(2)
        del self.there[name]


class World:
    def __init__(self, *names: str, room: float = 1.0, max_waiting: int = 8, **options: Any) -> None:
        self.apps = Apps(room)
        self.names = names
        self.room = room
        self.options = options
        self.hanging: ModelUses | None = None
        self.owner = self.new_owner()
        self.ingresses = [
            ModelUses(names, lambda name, s: self.owner.load(name, timeout_s=s), max_waiting=max_waiting)
            for _ in range(2)
        ]

    def new_owner(self) -> ModelOwner:
        entries = [ModelEntry(name=name, needs=Room(1.0), **self.options) for name in self.names]
        return ModelOwner(ModelTable(entries, Room(self.room)), self.apps, self)

    async def usage(self) -> Mapping[str, ModelUse]:
        all_uses = [ingress.usage() for ingress in self.ingresses]
        return {
            name: ModelUse(
                sum(uses[name].num_users for uses in all_uses), min(uses[name].idle_s for uses in all_uses)
            )
            for name in self.names
        }

    async def close(self, name: str, *, is_forced: bool) -> bool:
        closed = [ingress.close(name, is_forced=is_forced) for ingress in self.ingresses]
        return all(closed)

    async def ask(
        self, name: str, *, seconds: float = 1.0, ingress: int = 0, timeout_s: float = 100.0
    ) -> float:
        """A request that runs for a while; returns when its model was there."""
        uses = self.ingresses[ingress]
        await uses.enter(name, timeout_s)
        began_s = asyncio.get_running_loop().time()
        for _ in range(10):
            assert self.apps.there.get(name) is ModelState.LOADED, "it left under a request"
            await asyncio.sleep(seconds / 10)
        uses.leave(name)
        return began_s


def run(world: World, main: Callable[[], Awaitable[None]]) -> None:
    async def with_owner() -> None:
        async with asyncio.timeout(10_000):
            work = asyncio.create_task(world.owner.run())
            await main()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    VirtualClock().run(with_owner())


def test_a_request_loads_its_model_and_others_wait_for_the_same_load() -> None:
    world = World("a", "b", room=2.0)

    async def main() -> None:
        began = await asyncio.gather(*(world.ask("a", ingress=number % 2) for number in range(4)))
        assert began == [10.0] * 4
        assert await world.ask("a", ingress=1) == pytest.approx(11.0)

    run(world, main)
    assert world.apps.events == ["load a"]


def test_requests_to_more_models_than_there_is_room_for_are_all_answered() -> None:
    world = World("a", "b", "c", max_waiting=30)

    async def main() -> None:
        names = ["a", "b", "c"] * 10
        await asyncio.gather(
            *(world.ask(name, ingress=number % 2, timeout_s=1000) for number, name in enumerate(names))
        )

    run(world, main)
    assert world.apps.events == ["load a", "unload a", "load b", "unload b", "load c"]


def test_a_model_stays_between_its_load_and_the_request_that_waited_at_the_other_ingress() -> None:
    world = World("a", "b")

    async def main() -> None:
        first = asyncio.create_task(world.ask("a", seconds=30))
        await asyncio.sleep(1)
        second = asyncio.create_task(world.ask("b", ingress=1))
        await asyncio.sleep(0)
        third = asyncio.create_task(world.ask("a", ingress=1, seconds=40))
        assert await first == 10.0
        assert await third == 10.0
        # The third ends at 50 s; a look every second, 2 s to unload, 10 to load.
        assert 62.0 <= await second <= 64.0

    run(world, main)


def test_a_request_that_comes_while_its_model_leaves_gets_it_again() -> None:
    world = World("a", "b")

    async def main() -> None:
        await world.ask("a")
        other = asyncio.create_task(world.ask("b"))
        await asyncio.sleep(1)
        assert world.apps.there == {"a": ModelState.DRAINING}
        again = await world.ask("a", ingress=1)
        assert await other < again

    run(world, main)
    assert world.apps.events == ["load a", "unload a", "load b", "unload b", "load a"]


def test_without_room_in_time_the_error_says_what_takes_it() -> None:
    world = World("a", "b")

    async def main() -> None:
        busy = asyncio.create_task(world.ask("a", seconds=100))
        await asyncio.sleep(20)
        with pytest.raises(EngineLostError, match=r"model 'b' found no room within 5 s: .* are taken by a"):
            await world.ask("b", timeout_s=5)
        await busy
        # Nobody waits for it any more, so nothing is loaded.
        await asyncio.sleep(100)

    run(world, main)
    assert world.apps.events == ["load a"]


def test_a_load_that_fails_is_told_to_all_who_wait_and_to_those_who_come_soon() -> None:
    world = World("a")
    world.apps.problems["a"] = ModelLoadError("model.safetensors is cut")

    async def main() -> None:
        results = await asyncio.gather(*(world.ask("a") for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in results] == [
            "model 'a' could not be loaded: model.safetensors is cut; the next attempt is possible in 5 s"
        ] * 3
        with pytest.raises(EngineLostError, match="in 5 s"):
            await world.ask("a")
        assert world.owner.statuses()["a"].reason == "model.safetensors is cut"
        await asyncio.sleep(5)
        del world.apps.problems["a"]
        await world.ask("a")

    run(world, main)
    assert world.apps.events == ["load a", "load a"]


def test_too_many_do_not_wait() -> None:
    world = World("a", max_waiting=2)

    async def main() -> None:
        results = await asyncio.gather(*(world.ask("a") for _ in range(3)), return_exceptions=True)
        assert results[:2] == [10.0, 10.0]
        assert str(results[2]) == "model 'a' is not loaded, and 2 requests wait for loads; allowed: 2"

    run(world, main)


def test_unloading_is_told_when_it_is_done_and_idle_models_leave_by_themselves() -> None:
    world = World("a", "b", room=2.0, keep_alive_s=30.0)

    async def main() -> None:
        await world.ask("a")
        await world.ask("b")
        status = await world.owner.unload("a", timeout_s=10)
        assert status.state is ModelState.UNLOADED
        assert world.apps.there == {"b": ModelState.LOADED}
        await asyncio.sleep(27)
        assert world.apps.there == {"b": ModelState.LOADED}
        await asyncio.sleep(4)
        assert world.apps.there == {}

    run(world, main)


def test_what_a_model_was_seen_to_take_counts_when_another_wants_room() -> None:
    world = World("a", "b", "c", room=10.0)
    world.apps.bytes = {"a": 4}

    async def main() -> None:
        await world.ask("a")
        await asyncio.sleep(0)
        assert world.owner.statuses()["a"].memory_gib == 4 / 2**30
        await world.ask("b")
        # Its caches have filled: with both there is no room for a third.
        world.apps.bytes = {"a": 9}
        await world.ask("c")
        assert world.apps.remembered == {"a": 9}
        assert world.apps.there.keys() == {"b", "c"}
        assert world.owner.statuses()["a"].memory_gib == 9 / 2**30

    run(world, main)


def test_a_new_owner_finds_what_was_there_and_ends_what_was_begun() -> None:
    world = World("a", "b", "c", room=4.0)
    world.apps.there = {
        "a": ModelState.LOADED,
        "b": ModelState.LOADING,
        "c": ModelState.DRAINING,
        "gone": ModelState.LOADED,
    }

    async def main() -> None:
        await world.ask("a")
        states = {name: each.state.value for name, each in world.owner.statuses().items()}
        assert states == {"a": "loaded", "b": "loaded", "c": "unloaded"}

    run(world, main)
    assert world.apps.events == ["load b", "unload c"]
