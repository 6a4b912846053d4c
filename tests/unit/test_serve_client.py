"""A router behind a Serve handle: what callers see of Ray's errors, and that no call is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from specray.actors.client import ServeRouterClient, translate
from specray.errors import EngineLostError, OverloadedError


class Response:
    """A DeploymentResponse that never comes."""

    is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.sleep(60).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A DeploymentHandle whose every method is answered by one response."""

    def __init__(self) -> None:
        self.response = Response()
        self.service_info = self

    def options(self, *, stream: bool) -> Handle:
        return self

    def remote(self) -> Response:
        return self.response


def test_a_full_router_is_overload_and_a_dead_one_is_lost() -> None:
    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    assert isinstance(translate(full), OverloadedError)
    assert isinstance(translate(RayActorError()), EngineLostError)


async def test_a_silent_router_is_lost_and_its_call_cancelled() -> None:
    handle: Any = Handle()
    with pytest.raises(EngineLostError, match=r"did not answer within 0\.01 s"):
        await ServeRouterClient(handle, timeout_s=0.01).service_info()
    assert handle.response.is_cancelled


async def test_a_cancelled_caller_cancels_the_call() -> None:
    handle: Any = Handle()
    call = asyncio.ensure_future(ServeRouterClient(handle, timeout_s=60).service_info())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert handle.response.is_cancelled
