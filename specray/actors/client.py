"""Client of the Router deployment, for ingresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from specray.actors.answers import raise_if_error
from specray.actors.attempts import Attempts, RouterLostError
from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError, SpecrayError
from specray.interfaces import Clock
from specray.requests import GenerateRequest, OutputChunk, ServiceInfo
from specray.router.output.delivery import Delivery
from specray.router.trace import Routed, encode_trace
from specray.router.transport.clock import SystemClock
from specray.routing import Choice, SharedChoice

logger = logging.getLogger(__name__)

SERVE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""Exceptions that a call through a Serve handle may raise besides those of the router."""


def translate(error: Exception) -> Exception:
    """Translates an exception raised by Ray into one that a caller of a remote router should see."""
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


UNLOAD_TIMEOUT_S: Final = 30.0


class ServeRouterClient:
    """interfaces.RouterClient over a DeploymentHandle.

    Serve carries requests, whole answers and errors. The chunks of a stream go directly from the router to
    the mailbox: through Serve each would be a message between two event loops, as costly as the request
    itself.

    Args:
        handle: handle of the Router deployment.
        mailbox: receives streams; its owner starts it before the first one. None: nothing will be streamed.
        timeout_s: maximum seconds of a call, even when no replica is there to answer.
        clock: times the wait between a router's death and the next attempt.
        choice: chooses between several Routers, and learns from their answers; None: Serve chooses.
        on_choice: is told each choice when its request has ended, and the prompt tokens that were found.

    A request whose router dies is sent to the next one, which continues a stream from where it was.
    """

    def __init__(
        self,
        handle: DeploymentHandle[object],
        *,
        timeout_s: float,
        mailbox: Mailbox | None = None,
        clock: Clock | None = None,
        choice: SharedChoice | None = None,
        on_choice: Callable[[Choice, int], None] | None = None,
    ) -> None:
        self._handle = handle
        self._choice = choice
        self._on_choice = on_choice
        self._mailbox = mailbox
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        attempts = self._attempts(request)
        while True:
            request = attempts.request
            try:
                with self._chosen(request):
                    chunk: OutputChunk = await self._call(self._handle.complete.remote(request))
                    self._learn(chunk, chunk.token_ids)
                return chunk
            except RouterLostError as error:
                await attempts.renew(error)
            except OverloadedError as error:
                attempts.try_another(error)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        assert self._mailbox is not None, "a client that streams has a mailbox"
        attempts = self._attempts(request)
        while True:
            request = attempts.request
            delivery = self._mailbox.open(request.request_id)
            call = asyncio.create_task(
                self._watch(self._handle.deliver.remote(request, self._mailbox.address), delivery)
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            lost = None
            try:
                with self._chosen(request):
                    async for chunk in delivery.chunks(self._clock, 0):
                        taken = attempts.take(chunk)
                        self._learn(chunk, attempts.own_token_ids)
                        yield taken
                return
            except RouterLostError as error:
                lost = error
            except OverloadedError as error:
                attempts.try_another(error)
            finally:
                self._mailbox.close(request.request_id)
                if not delivery.is_ended:
                    call.cancel()
            if lost is not None:
                await attempts.renew(lost)

    @contextlib.contextmanager
    def _chosen(self, request: GenerateRequest) -> Iterator[None]:
        """The request is with the Router that was chosen for it. The choice hears how that ends."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
            raise
        finally:
            if self._choice is not None:
                self._choice.on_end(request.request_id, error)

    def _learn(self, chunk: OutputChunk, token_ids: Sequence[int]) -> None:
        if self._choice is None:
            return
        choice = self._choice.on_chunk(chunk, token_ids if chunk.finish_reason is not None else ())
        if choice is not None and self._on_choice is not None:
            self._on_choice(choice, chunk.num_cached_tokens)

    def _attempts(self, request: GenerateRequest) -> Attempts:
        has_others = self._choice is not None and self._choice.num_routers > 1
        return Attempts(request, self._clock, timeout_s=self._timeout_s, has_others=has_others)

    async def _watch(self, response: Any, delivery: Delivery) -> None:
        """Awaits the router's call, and fails the delivery if the call ends without the output's end."""
        try:
            await self._call(response)
            # Seconds that the last chunk may arrive after the end of the call, which takes another
            # connection.
            async with asyncio.timeout(5.0):
                while not delivery.is_ended:
                    await delivery.wait_change()
        except TimeoutError:
            delivery.fail(RouterLostError("the end of the output was lost; the request may be sent again"))
        except Exception as error:
            delivery.fail(error)

    async def service_info(self) -> ServiceInfo:
        info: ServiceInfo = await self._call(self._handle.service_info.remote())
        return info

    async def check_ready(self) -> None:
        await self._call(self._handle.check_ready.remote())

    async def load_adapter(self, folder: str, digest: bytes = b"", *, is_pinned: bool = False) -> bytes:
        found: bytes = await self._call(self._handle.load_adapter.remote(folder, digest, is_pinned))
        return found

    async def unload_adapter(self, digest: bytes) -> None:
        """Unloads it from all Routers; those that do not answer in time keep it until it gives its place."""

        def unload() -> None:
            response = self._handle.broadcast("unload_adapter", digest)
            for answer in response.results(timeout_s=UNLOAD_TIMEOUT_S, return_exceptions=True):
                if isinstance(answer, Exception):
                    logger.warning("an adapter was not unloaded: %s", answer)

        try:
            await asyncio.to_thread(unload)
        except (TimeoutError, *SERVE_ERRORS) as error:
            logger.warning("an adapter was not unloaded everywhere: %s", error)

    async def metrics_text(self) -> str:
        text: str = await self._call(self._handle.metrics_text.remote())
        return text

    async def trace_text(self) -> str | None:
        text: str | None = await self._call(self._handle.trace_text.remote())
        if text is None or self._choice is None:
            return text
        return text + encode_trace([_routed(choice) for choice in self._choice.last])

    async def _call(self, response: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return raise_if_error(await response)
        except TimeoutError:
            response.cancel()
            raise EngineLostError(f"the router did not answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        except SERVE_ERRORS as error:
            raise translate(error) from error


def _routed(choice: Choice) -> Routed:
    return Routed(
        round(1e9 * choice.chosen_s),
        choice.request_id,
        choice.router,
        choice.reason,
        choice.costs,
        choice.num_prompt_tokens,
        choice.num_expected_tokens,
    )
