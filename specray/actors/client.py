"""A router behind a Serve handle, for ingresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from specray.errors import EngineLostError, OverloadedError, SpecrayError
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


class ServeRouterClient:
    """interfaces.RouterClient over a DeploymentHandle.

    Args:
        handle: of the Router deployment.
        timeout_s: no call waits longer, even when no replica is there to answer.
    """

    def __init__(self, handle: DeploymentHandle[object], *, timeout_s: float) -> None:
        self._handle = handle
        # Handles made by options() are cached here: each new one costs a metrics pusher and a long poll.
        self._streaming = handle.options(stream=True)
        self._timeout_s = timeout_s

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        chunk: OutputChunk = await self._call(self._handle.complete.remote(request))
        return chunk

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """See interfaces.RouterClient."""
        response: Any = self._streaming.stream.remote(request)
        is_done = False
        try:
            while True:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        chunk: OutputChunk = await anext(response)
                except StopAsyncIteration:
                    is_done = True
                    return
                yield chunk
                if chunk.finish_reason is not None:
                    is_done = True
                    return
        except TimeoutError:
            raise EngineLostError(f"the router did not answer within {self._timeout_s:g} s") from None
        except SERVE_ERRORS as error:
            raise translate(error) from error
        finally:
            if not is_done:
                response.cancel()

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
