"""Starts a real service for each module of end-to-end tests: Ray, Serve, HTTP, gRPC, and the embedded
pair."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.e2e.calls import DEADLINE_S
from tests.e2e.service import Service, started


@pytest.fixture(scope="session", autouse=True)
def patient_proxies() -> Iterator[None]:
    """Lets Serve wait for a proxy, which it replaces after 20 s; a loaded machine imports Ray slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")
        yield


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """ROUTER, TARGET and DRAFT of a module are what it adds to these sections of the configuration."""
    names = ("target", "draft", "router")
    with started(**{name: getattr(request.module, name.upper(), {}) for name in names}) as service:
        yield service


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, timeout=timeout) as session:
        yield session
