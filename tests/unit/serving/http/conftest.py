"""A server that all tests of a module may ask, those that use it on the module's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import INFO, Service, serving


@pytest.fixture(scope="module")
def shared_router(request: pytest.FixtureRequest) -> FakeRouterClient:
    """What the module's ``make_router`` makes, or one that repeats its prompts."""
    make = getattr(request.module, "make_router", lambda: FakeRouterClient(info=INFO))
    router: FakeRouterClient = make()
    return router


@pytest.fixture
def router(shared_router: FakeRouterClient) -> FakeRouterClient:
    """The router of ``service``, which has seen no request yet."""
    shared_router.requests.clear()
    return shared_router


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(request: pytest.FixtureRequest, shared_router: FakeRouterClient) -> AsyncIterator[Service]:
    """With the module's CONFIG, if it has one."""
    async with serving(shared_router, config=getattr(request.module, "CONFIG", None)) as running:
        yield running
