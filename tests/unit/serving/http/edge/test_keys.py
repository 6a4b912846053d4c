"""Requests of one caller share the turns of the event loop, so that nobody's step waits for many of them."""

from __future__ import annotations

import asyncio

from specray.serving.http.edge.keys import Turns


async def test_one_goes_on_in_each_turn_of_the_loop() -> None:
    turns, gone, seen = Turns(), 0, []

    async def request() -> None:
        nonlocal gone
        await turns.take()
        gone += 1

    tasks = [asyncio.create_task(request()) for _ in range(5)]
    while gone < 5:
        before = gone
        await asyncio.sleep(0)
        seen.append(gone - before)
    assert max(seen) == 1
    await asyncio.gather(*tasks)
    async with asyncio.timeout(10):
        await turns.take()


async def test_order_is_kept_and_who_left_takes_no_turn() -> None:
    turns, order = Turns(), []

    async def request(name: int) -> None:
        await turns.take()
        order.append(name)

    tasks = [asyncio.create_task(request(n)) for n in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 3]
