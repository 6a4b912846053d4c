"""A router behind a Serve handle, for ingresses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError, SpecrayError
from specray.interfaces import Clock
from specray.requests import GenerateRequest, OutputChunk, ServiceInfo
from specray.router.clock import SystemClock
from specray.router.delivery import Delivery

SERVE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""What a call through a Serve handle may raise besides its own result."""


class RouterLostError(EngineLostError):
    """The router that had the call has died."""


def translate(error: Exception) -> Exception:
    """The exception that a caller of a remote router should see for what Ray raised."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, SpecrayError) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("the router's queue is full")
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        return RouterLostError("the router was lost; the request may be sent again")
    if isinstance(error, (RequestCancelledError, TaskCancelledError)):
        return EngineLostError("the router stopped; the request may be sent again")
    return error


LAST_CHUNK_TIMEOUT_S: Final = 5.0
"""The end of a call and the last chunk come by different ways: the chunk may be so much later."""

RESEND_FOR_S: Final = 5.0
"""So long after a death Serve may still choose the router that has died."""
RESEND_PAUSE_S: Final = 0.25


class _Patience:
    """Whether a request of which nothing has come goes to the next router: for a while after one's death."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first_s: float | None = None

    async def pause(self, request: GenerateRequest, error: RouterLostError) -> GenerateRequest:
        """Returns the request under a new id, as the router may have been cut off rather than dead.

        Raises ``error`` when there has been enough of it.
        """
        now_s = self._clock.monotonic()
        self._first_s = now_s if self._first_s is None else self._first_s
        if now_s - self._first_s > RESEND_FOR_S:
            raise error
        await self._clock.sleep(RESEND_PAUSE_S)
        return replace(request, request_id=f"{request.request_id[:40]}-{uuid.uuid4().hex[:8]}")


class ServeRouterClient:
    """interfaces.RouterClient over a DeploymentHandle.

    Serve carries requests, whole answers and errors; the chunks of a stream come from the router straight
    into the mailbox. Through Serve each would be a message of its own between two event loops, which costs
    as much as the request itself.

    Args:
        handle: of the Router deployment.
        mailbox: started by whoever owns it, before the first stream; None: nothing will be streamed.
        timeout_s: no call waits longer, even when no replica is there to answer.
        clock: for the time between a router's death and the next attempt.

    A request whose router dies before it has brought anything goes to the next one by itself.
    """

    def __init__(
        self,
        handle: DeploymentHandle[object],
        *,
        timeout_s: float,
        mailbox: Mailbox | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._handle = handle
        self._mailbox = mailbox
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        patience = _Patience(self._clock)
        while True:
            try:
                chunk: OutputChunk = await self._call(self._handle.complete.remote(request))
                return chunk
            except RouterLostError as error:
                request = await patience.pause(request, error)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """See interfaces.RouterClient."""
        patience = _Patience(self._clock)
        is_begun = False
        while True:
            try:
                async with aclosing(self._stream_of_one(request)) as chunks:
                    async for chunk in chunks:
                        is_begun = True
                        yield chunk
                return
            except RouterLostError as error:
                if is_begun:
                    raise
                request = await patience.pause(request, error)

    async def _stream_of_one(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """The stream as far as one router brings it."""
        assert self._mailbox is not None, "a client that streams has a mailbox"
        delivery = self._mailbox.open(request.request_id)
        response = self._handle.deliver.remote(request, self._mailbox.address)
        call = asyncio.create_task(self._watch(response, delivery))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            async for chunk in delivery.chunks(self._clock, 0):
                yield chunk
        finally:
            self._mailbox.close(request.request_id)
            if not delivery.is_ended:
                call.cancel()

    async def _watch(self, response: Any, delivery: Delivery) -> None:
        """Sees the router's call to its end, and tells the delivery when that is not the output's end."""
        try:
            await self._call(response)
            async with asyncio.timeout(LAST_CHUNK_TIMEOUT_S):
                while not delivery.is_ended:
                    await delivery.wait_change()
        except TimeoutError:
            delivery.fail(EngineLostError("the end of the output was lost; the request may be sent again"))
        except Exception as error:
            delivery.fail(error)

    async def service_info(self) -> ServiceInfo:
        """See interfaces.RouterClient."""
        info: ServiceInfo = await self._call(self._handle.service_info.remote())
        return info

    async def check_ready(self) -> None:
        """See interfaces.RouterClient."""
        await self._call(self._handle.check_ready.remote())

    async def metrics_text(self) -> str:
        """See interfaces.RouterClient."""
        text: str = await self._call(self._handle.metrics_text.remote())
        return text

    async def trace_text(self) -> str | None:
        """See interfaces.RouterClient."""
        text: str | None = await self._call(self._handle.trace_text.remote())
        return text

    async def _call(self, response: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await response
        except TimeoutError:
            response.cancel()
            raise EngineLostError(f"the router did not answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        except SERVE_ERRORS as error:
            raise translate(error) from error
