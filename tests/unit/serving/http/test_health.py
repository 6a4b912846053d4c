"""The endpoints beside those of the API: health, readiness, metrics and version."""

from __future__ import annotations

import asyncio

from specray.fakes import FakeRouterClient
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
