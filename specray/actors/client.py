"""A router behind a Serve handle, for ingresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError, SpecrayError
from specray.router.clock import SystemClock
from specray.router.delivery import Delivery
from specray.types import GenerateRequest, OutputChunk, ServiceInfo

SERVE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""What a call through a Serve handle may raise besides its own result."""


def translate(error: Exception) -> Exception:
    """The exception that a caller of a remote router should see for what Ray raised."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, SpecrayError) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("the router's queue is full")
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        return EngineLostError("the router was lost; the request may be sent again")
    if isinstance(error, (RequestCancelledError, TaskCancelledError)):
        return EngineLostError("the router stopped; the request may be sent again")
    return error


LAST_CHUNK_TIMEOUT_S: Final = 5.0
"""The end of a call and the last chunk come by different ways: the chunk may be so much later."""


class ServeRouterClient:
    """interfaces.RouterClient over a DeploymentHandle.

    Serve carries requests, whole answers and errors; the chunks of a stream come from the router straight
    into the mailbox. Through Serve each would be a message of its own between two event loops, which costs
    as much as the request itself.

    Args:
        handle: of the Router deployment.
        mailbox: started by whoever owns it, before the first stream; None: nothing will be streamed.
        timeout_s: no call waits longer, even when no replica is there to answer.
    """

    def __init__(
        self, handle: DeploymentHandle[object], *, timeout_s: float, mailbox: Mailbox | None = None
    ) -> None:
        self._handle = handle
        self._mailbox = mailbox
        self._clock = SystemClock()
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        chunk: OutputChunk = await self._call(self._handle.complete.remote(request))
        return chunk

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """See interfaces.RouterClient."""
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
