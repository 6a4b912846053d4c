"""Tests of the call limiter: a few at a time, counted before they arrive, and never held up for long."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from specray.config import parse_config
from specray.errors import EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient, VirtualClock
from specray.requests import ServiceInfo
from specray.serving.admission.capacity import RouterCapacity
from specray.serving.admission.limiter import CallLimiter, release_slot
from tests.unit.router.harness import in_virtual_time
from tests.unit.serving.http.service import INFO, MODEL, REPLY, endless, say, serving, wait_until

TEXT = {"prompt": "a", "max_tokens": 4}


@in_virtual_time
async def test_calls_go_in_a_few_at_a_time_in_the_order_in_which_they_came(clock: VirtualClock) -> None:
    limiter = CallLimiter(max_calls=2)
    inside: list[int] = []
    leave = [asyncio.Event() for _ in range(5)]

    async def call(number: int) -> None:
        slot = await limiter.enter()
        inside.append(number)
        await leave[number].wait()
        slot.leave()
        slot.leave()

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(call(number))
        await asyncio.sleep(0)
        assert (inside, limiter.num_calls) == ([0, 1], 5)
        for number in (1, 0):
            leave[number].set()
            await asyncio.sleep(0.001)
        assert (inside, limiter.num_calls) == ([0, 1, 2, 3], 3)
        for event in leave:
            event.set()
    assert (inside[-1], limiter.num_calls) == (4, 0)


@in_virtual_time
async def test_who_has_waited_long_goes_in_whoever_is_there_and_who_gives_up_is_gone(
    clock: VirtualClock,
) -> None:
    limiter = CallLimiter(max_calls=1, max_wait_s=0.01)
    first = await limiter.enter()
    second = await limiter.enter()
    assert limiter.num_calls == 2
    second.leave()
    # What had no place gives none back: the next one waits as well.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await limiter.enter()
    assert limiter.num_calls == 1
    first.leave()
    async with asyncio.timeout(0.005):
        (await limiter.enter()).leave()
    assert limiter.num_calls == 0


async def test_call_arrives_from_a_task_of_its_own_too() -> None:
    limiter = CallLimiter()

    async def call() -> None:
        await limiter.enter()
        await asyncio.create_task(ask())

    async def ask() -> None:
        release_slot()

    await asyncio.create_task(call())
    assert limiter.num_calls == 0
    release_slot()


async def test_calls_on_their_way_are_counted_as_if_they_had_arrived_but_not_against_themselves() -> None:
    capacity = RouterCapacity(3)
    capacity.begin("", 0)

    async def call() -> None:
        slot = await capacity.limiter.enter()
        # The application asks again before it tokenises: of three there are two others.
        capacity.check("", 0)
        await may_leave.wait()
        slot.leave()

    may_leave = asyncio.Event()
    tasks = [asyncio.create_task(call()) for _ in range(2)]
    await asyncio.sleep(0)
    assert capacity.may_refuse
    with pytest.raises(OverloadedError, match="3 requests are under way; allowed: 3"):
        capacity.check("", 0)
    capacity.check("", -1)
    may_leave.set()
    await asyncio.gather(*tasks)
    assert not capacity.may_refuse
    capacity.check("", 0)


class SlowRouter(FakeRouterClient):
    """Says nothing of itself until it is told to."""

    def __init__(self) -> None:
        super().__init__(info=INFO)
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def service_info(self) -> ServiceInfo:
        self.num_asked += 1
        await self.may_answer.wait()
        return INFO


async def test_call_is_refused_at_once_when_those_on_their_way_will_fill_the_routers() -> None:
    router = SlowRouter()
    sizes = {"target": {"max_num_seqs": 1}, "router": {"max_queued_requests": 3}}
    async with serving(router, config=parse_config({"served_model_name": MODEL, **sizes})) as service:
        tasks = {asyncio.create_task(service.post("/v1/completions", TEXT)) for _ in range(5)}
        # Two are let in and wait for what the model allows, two wait for them; the routers have none yet.
        done, waiting = await asyncio.wait(tasks, timeout=1.5, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0] for task in done] == [429]
        assert (router.requests, router.num_asked) == ([], 2)
        router.may_answer.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 4


async def test_who_is_slow_to_send_a_body_holds_up_nobody() -> None:
    router = say(REPLY)
    async with serving(router) as service:
        address = urlsplit(service.url)
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            writers.append(writer)
        async with asyncio.timeout(1.5):
            assert (await service.post("/v1/completions", TEXT))[0] == 200
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_place_is_free_again_after_every_kind_of_end(stream: bool) -> None:
    router = endless(errors=[EngineLostError("lost"), EngineLostError("lost")])
    async with serving(router) as service:

        async def status(body: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            async with service.http.post("/v1/completions", data=body, headers=headers) as response:
                return response.status

        good = json.dumps({**TEXT, "stream": stream}).encode()
        async with asyncio.timeout(1.5):
            assert [await status(b"{no json") for _ in range(3)] == [400] * 3
            assert [await status(good) for _ in range(2)] == [503, 503]
        # Those that run hold no place: more of them than there are places.
        running = [asyncio.create_task(status(good)) for _ in range(4)]
        async with asyncio.timeout(1.5):
            await wait_until(lambda: len(router.requests) == 6)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
