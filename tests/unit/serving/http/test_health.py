"""The endpoints beside those of the API: health, readiness, metrics and version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from specray.errors import EngineLostError
from specray.fakes import FakeRouterClient, VirtualClock
from specray.serving.readiness import Liveness
from tests.unit.serving.http.service import INFO, TEXT, endless, serving, wait_until


async def test_health_ready_metrics_and_version() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        for path in ("/health", "/ping", "/ready", "/load", "/version", "/metrics", "/v1/models"):
            async with service.http.get(path) as response:
                assert response.status == 200
            async with service.http.head(path) as response:
                assert (response.status, await response.read()) == (200, b"")
        async with service.http.post("/ping") as response:
            assert response.status == 200
        router.is_ready = False
        assert (await service.http.head("/ready")).status == 503
        async with service.http.get("/ready") as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"] == "the fake target is lost"
        async with service.http.get("/health") as response:
            assert response.status == 200
        async with service.http.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "specray_fake_total 1.0" in await response.text()


async def test_load_is_the_number_of_requests_in_hand() -> None:
    router = endless()
    async with serving(router) as service:
        assert await (await service.http.get("/load")).json() == {"server_load": 0}
        call = asyncio.create_task(service.post("/v1/completions", {**TEXT, "n": 3}))
        await wait_until(lambda: len(router.requests) == 3)
        assert await (await service.http.get("/load")).json() == {"server_load": 3}
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def test_health_fails_where_no_router_answers_beyond_a_routers_replacement() -> None:
    clock = VirtualClock()
    client: Any = FakeRouterClient(info=INFO)
    answer = client.service_info

    async def lost() -> None:
        raise EngineLostError("the router was lost")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def is_alive(liveness: Liveness) -> bool:
        try:
            await liveness.check()
        except EngineLostError as error:
            assert str(error) == "no Router answers"
            return False
        return True

    async def outage(failure: Callable[[], Awaitable[None]]) -> list[bool]:
        """Asks at the start, when a Router has answered, every second of an outage, and afterwards."""
        liveness = Liveness(client, monotonic=clock.monotonic)
        client.service_info = failure
        found = [await is_alive(liveness)]
        client.service_info = answer
        found.append(await is_alive(liveness))
        end_s = clock.monotonic() + 40
        client.service_info = failure
        while clock.monotonic() < end_s:
            await clock.sleep(1.0)
            found.append(await is_alive(liveness))
        client.service_info = answer
        return [*found, await is_alive(liveness)]

    # A call that hangs takes a second itself.
    assert clock.run(outage(lost)) == [False, True, *[True] * 29, *[False] * 11, True]
    assert clock.run(outage(hang)) == [False, True, *[True] * 14, *[False] * 6, True]
