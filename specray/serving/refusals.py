"""Refusals at the ingress: before a prompt is tokenised and a router is asked, where the answer is known.

Two kinds. A router that has just refused a tenant would refuse its next request too, so for a blink the
ingress says so itself (``HeldRefusals``). And an ingress that has too many calls in hand refuses the next
before it reads its body (``RoomMiddleware``): whatever else is slow, memory stays bounded.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.errors import OverloadedError
from specray.interfaces import RouterClient
from specray.serving.generation import close
from specray.serving.observe_http import record_of
from specray.serving.problems import problem_response
from specray.types import GenerateRequest, OutputChunk, ServiceInfo

HOLD_S = 0.05
"""So long a router's refusal is repeated without asking it. Short beside the time in which a place becomes
free in a queue that is full, so no room is lost; a router sees at most 20 refusals a second and tenant."""
_MAX_TENANTS = 1024
_ROOM_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Held:
    priority: int
    """The most urgent that was refused."""
    until_s: float
    message: str
    retry_after_s: float


class HeldRefusals:
    """What routers have just refused, by tenant.

    Args:
        monotonic: seconds; all time is read from it.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._by_tenant: dict[str, _Held] = {}

    def check(self, tenant: str, priority: int) -> None:
        """Raises OverloadedError when a request like this one, or a more urgent one, was just refused."""
        held = self._by_tenant.get(tenant)
        if held is None:
            return
        if self._monotonic() >= held.until_s:
            del self._by_tenant[tenant]
        elif priority >= held.priority:
            raise OverloadedError(held.message, held.retry_after_s)

    def hold(self, tenant: str, priority: int, error: OverloadedError) -> None:
        """A router has refused this."""
        if len(self._by_tenant) >= _MAX_TENANTS:
            self._by_tenant.clear()
        until_s = self._monotonic() + HOLD_S
        self._by_tenant[tenant] = _Held(priority, until_s, error.message, error.retry_after_s)


class RefusingClient:
    """interfaces.RouterClient that repeats a router's refusals for a blink instead of asking again."""

    def __init__(self, client: RouterClient, held: HeldRefusals | None = None) -> None:
        self._client = client
        self.held = held or HeldRefusals()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        self.held.check(request.tenant, request.priority)
        try:
            return await self._client.complete(request)
        except OverloadedError as error:
            self.held.hold(request.tenant, request.priority, error)
            raise

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """See interfaces.RouterClient."""
        self.held.check(request.tenant, request.priority)
        chunks = self._client.stream(request)
        try:
            async for chunk in chunks:
                yield chunk
        except OverloadedError as error:
            self.held.hold(request.tenant, request.priority, error)
            raise
        finally:
            await close(chunks)

    async def service_info(self) -> ServiceInfo:
        """See interfaces.RouterClient."""
        return await self._client.service_info()

    async def check_ready(self) -> None:
        """See interfaces.RouterClient."""
        await self._client.check_ready()

    async def metrics_text(self) -> str:
        """See interfaces.RouterClient."""
        return await self._client.metrics_text()

    async def trace_text(self) -> str | None:
        """See interfaces.RouterClient."""
        return await self._client.trace_text()


class RoomMiddleware:
    """Bounds the calls that one ingress has in hand; those beyond are refused before their body is read."""

    def __init__(self, app: ASGIApp, *, max_calls: int) -> None:
        self._app = app
        self._max_calls = max_calls
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whether the service lives can be asked of a full one too.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_calls >= self._max_calls:
            reason = f"{self._num_calls} calls are in hand; allowed: {self._max_calls}"
            error = OverloadedError(reason, _ROOM_RETRY_S)
            record_of(Request(scope)).failed(error)
            await problem_response(error)(scope, receive, send)
            return
        self._num_calls += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_calls -= 1
