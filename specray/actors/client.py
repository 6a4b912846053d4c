"""Client of the Router deployment, for ingresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from specray.actors.answers import raise_if_error
from specray.actors.mailbox import Mailbox
from specray.errors import EngineLostError, OverloadedError, SpecrayError
from specray.interfaces import Clock
from specray.requests import GenerateRequest, OutputChunk, Resumption, ServiceInfo
from specray.router.output.delivery import Delivery
from specray.router.trace import Routed, encode_trace
from specray.router.transport.clock import SystemClock
from specray.routing import Choice, SharedChoice

logger = logging.getLogger(__name__)

SERVE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""Exceptions that a call through a Serve handle may raise besides those of the router."""


class RouterLostError(EngineLostError):
    """The router that had the call has died, or its output was lost."""


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


RESEND_FOR_S: Final = 5.0
"""Seconds after a router's death during which Serve may still choose it."""
UNLOAD_TIMEOUT_S: Final = 30.0
MAX_RESUMED: Final = 5
"""Maximum number of routers that may die under one request with tokens; it might be what kills them."""


class _Attempts:
    """One request's attempts: when its router dies, the next router continues the output.

    So neither a dead router nor one whose grace period is over loses output. Tokens of greedy and coupled
    sampling do not change. With rejection sampling the draws depend on where rounds end, as always; the
    distribution is the same, since tokens that the caller has are kept.
    """

    def __init__(self, request: GenerateRequest, clock: Clock, *, timeout_s: float, has_others: bool) -> None:
        self.request = request
        """The request as the next router gets it."""
        self._asked = request
        self._clock = clock
        self._checkpoint = ""
        self._began_s = clock.monotonic()
        self._end_s = self._began_s + (timeout_s if request.timeout_s is None else request.timeout_s)
        self._token_ids: list[int] = []
        self._may_try_another = has_others
        self._ttft_s: float | None = None
        self._num_resumed = 0
        self._lost_s: float | None = None
        """Time of the first router's loss since tokens last arrived, in seconds."""

    def take(self, chunk: OutputChunk) -> OutputChunk:
        """Converts a chunk for the caller: later routers do not count the first tokens."""
        self._checkpoint = chunk.checkpoint or self._checkpoint
        if chunk.token_ids:
            self._token_ids.extend(chunk.token_ids)
            self._lost_s = None
            if self._ttft_s is None:
                self._ttft_s = self._clock.monotonic() - self._began_s
        if self.request.resumed is not None and chunk.finish_reason is not None:
            return replace(chunk, ttft_s=self._ttft_s)
        return chunk

    @property
    def own_token_ids(self) -> Sequence[int]:
        """Tokens of the output since the request was made or resumed."""
        resumed = self.request.resumed
        return self._token_ids[0 if resumed is None else len(resumed.token_ids) :]

    def try_another(self, error: OverloadedError) -> None:
        """Makes the request for another router than the one that refused it, once; else raises ``error``."""
        if not self._may_try_another:
            raise error
        self._may_try_another = False
        self.request = replace(self.request, request_id=self._new_id())

    async def renew(self, error: RouterLostError) -> None:
        """Makes the request for the next router, under a new id, since the last may be cut off, not dead.

        Raises ``error`` after too many attempts.
        """
        now_s = self._clock.monotonic()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self._num_resumed += bool(self._token_ids)
        if now_s - self._lost_s > RESEND_FOR_S or self._num_resumed > MAX_RESUMED:
            raise error
        await self._clock.sleep(0.25)
        remaining_s = self._end_s - self._clock.monotonic()
        if remaining_s <= 0:
            raise error
        asked, token_ids = self._asked, tuple(self._token_ids)
        self.request = replace(
            asked,
            request_id=self._new_id(),
            timeout_s=None if asked.timeout_s is None else remaining_s,
            resumed=Resumption(token_ids, self._checkpoint) if token_ids else None,
        )

    def _new_id(self) -> str:
        return f"{self._asked.request_id[:40]}-{uuid.uuid4().hex[:8]}"


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

    def _attempts(self, request: GenerateRequest) -> _Attempts:
        has_others = self._choice is not None and self._choice.num_routers > 1
        return _Attempts(request, self._clock, timeout_s=self._timeout_s, has_others=has_others)

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
