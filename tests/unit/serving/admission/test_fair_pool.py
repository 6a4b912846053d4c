"""Work of many tenants in few threads: whose turn it is, and what becomes of work that nobody waits for."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress

import pytest

from specray.errors import DeadlineExceededError, OverloadedError
from specray.serving.admission.fair_pool import FairPool, Turn


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(30)
        return "held"


def make_pool(num_threads: int = 1, max_wait_s: float = 30.0, max_per_tenant: int | None = None) -> FairPool:
    return FairPool(num_threads, "test", what="works", max_wait_s=max_wait_s, max_per_tenant=max_per_tenant)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


async def started(pool: FairPool, work: Held, tenant: str = "") -> asyncio.Task[str]:
    task = asyncio.create_task(pool.run(work, Turn(tenant)))
    await asyncio.to_thread(work.began.wait, 30)
    return task


def test_work_returns_its_result_raises_its_error_and_sees_the_context_of_its_call() -> None:
    name = contextvars.ContextVar("name", default="")

    def fail() -> None:
        raise TimeoutError("its own")

    async def main() -> None:
        pool = make_pool()
        name.set("chat")
        assert await pool.run(name.get) == "chat"
        with pytest.raises(TimeoutError, match="its own"):
            await pool.run(fail)

    run(main)


def test_the_second_tenant_is_next_however_much_work_of_the_first_waits() -> None:
    async def main() -> None:
        pool, held, order = make_pool(), Held(), list[str]()
        first = await started(pool, held, "many")
        others = [
            asyncio.create_task(pool.run(lambda name=f"many{index}": order.append(name), Turn("many")))
            for index in range(20)
        ]
        await asyncio.sleep(0)
        others.append(asyncio.create_task(pool.run(lambda: order.append("few"), Turn("few"))))
        await asyncio.sleep(0)
        assert pool.num_waiting == 21
        held.go.set()
        await asyncio.gather(first, *others)
        # The first tenant's next one had the same tag when it was charged for what ran.
        assert order.index("few") <= 1
        assert [name for name in order if name != "few"] == [f"many{index}" for index in range(20)]

    run(main)


def test_a_tenant_pays_for_the_time_that_its_work_took(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, order = make_pool(), list[str]()
        long = Held()
        task = await started(pool, long, "long")
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + 10.0)
        waits = [
            asyncio.create_task(pool.run(lambda name=name: order.append(name), Turn(name)))
            for name in ("long", "short", "short", "short")
        ]
        await asyncio.sleep(0)
        long.go.set()
        await asyncio.gather(task, *waits)
        # Ten seconds of work against next to none.
        assert order == ["short", "short", "short", "long"]

    run(main)


def test_work_whose_deadline_passes_in_line_is_never_done() -> None:
    async def main() -> None:
        pool, held, done = make_pool(), Held(), list[int]()
        first = await started(pool, held)
        with pytest.raises(DeadlineExceededError, match="while the call waited for works"):
            await pool.run(lambda: done.append(1), Turn("", asyncio.get_running_loop().time() + 0.01))
        assert pool.num_waiting == 0
        held.go.set()
        assert await first == "held"
        assert await pool.run(lambda: 7) == 7
        assert done == []

    run(main)


def test_no_thread_for_long_is_an_overload_and_not_a_deadline() -> None:
    async def main() -> None:
        pool, held = make_pool(max_wait_s=0.01), Held()
        first = await started(pool, held)
        with pytest.raises(OverloadedError, match=r"the call waited 0\.01 s for the works of others"):
            await pool.run(lambda: 1, Turn("", asyncio.get_running_loop().time() + 20))
        held.go.set()
        await first

    run(main)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_work_that_runs_keeps_its_place_when_its_caller_leaves(is_cancelled: bool) -> None:
    async def main() -> None:
        pool, held = make_pool(), Held()
        if is_cancelled:
            task = await started(pool, held)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(DeadlineExceededError, match="during work on the call's works"):
                await pool.run(held, Turn("", asyncio.get_running_loop().time() + 0.01))
        second = asyncio.create_task(pool.run(lambda: 2))
        await asyncio.sleep(0.01)
        assert pool.num_waiting == 1
        held.go.set()
        assert await second == 2

    run(main)


def test_a_caller_that_leaves_as_its_turn_comes_hands_it_on() -> None:
    async def main() -> None:
        pool, held = make_pool(), Held()
        first = await started(pool, held)
        leaves = [asyncio.create_task(pool.run(lambda: 1)) for _ in range(3)]
        stays = asyncio.create_task(pool.run(lambda: 2))
        await asyncio.sleep(0)
        held.go.set()
        await first
        for task in leaves:
            task.cancel()
        assert await stays == 2
        await asyncio.gather(*leaves, return_exceptions=True)
        assert await asyncio.gather(*(pool.run(lambda: 3) for _ in range(4))) == [3] * 4

    run(main)


def test_a_thread_is_there_for_another_tenant_whatever_one_has_begun() -> None:
    async def main() -> None:
        pool, held = make_pool(2, max_per_tenant=1), Held()
        first = await started(pool, held, "many")
        second = asyncio.create_task(pool.run(lambda: "many", Turn("many")))
        assert await pool.run(lambda: "few", Turn("few")) == "few"
        assert await pool.run(lambda: "few", Turn("few")) == "few"
        assert not second.done() and pool.num_waiting == 1
        held.go.set()
        assert await asyncio.gather(first, second) == ["held", "many"]

    run(main)
