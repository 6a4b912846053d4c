"""The endpoints beside those of the API: health, readiness, metrics and version."""

from __future__ import annotations

from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import INFO, serving


async def test_health_ready_metrics_and_version() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        for path, status in [("/health", 200), ("/ready", 200), ("/version", 200)]:
            async with service.http.get(path) as response:
                assert response.status == status
            async with service.http.head(path) as response:
                assert (response.status, await response.read()) == (
                    status if path != "/version" else 405,
                    b"",
                )
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
