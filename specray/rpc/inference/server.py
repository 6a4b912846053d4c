"""gRPC server of the public InferenceService, around a handler in domain terms.

The ingress implements :class:`InferenceHandler` and raises the errors of :mod:`specray.errors`; this module
knows neither tokenizer nor router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar

import grpc
from grpc import aio
from grpc_reflection.v1alpha import reflection

from specray.errors import DeadlineExceededError
from specray.rpc.channel import ChannelOptions, bind, parse_address
from specray.rpc.codec.inference import (
    decode_generate_request,
    encode_generate_event,
    encode_service_info,
)
from specray.rpc.health import Health, Look
from specray.rpc.inference.messages import OpenCalls, PlainCall, read_message
from specray.rpc.inference.types import (
    Admitter,
    GenerateParams,
    Incoming,
    InferenceHandler,
    Refused,
)
from specray.rpc.status import status_of

INFERENCE_SERVICE: Final = "specray.v1.InferenceService"
MAX_CALLS: Final = 4096
WRITE_TIMEOUT_S: Final = 30.0
"""Seconds for a client to take a message, as over HTTP. gRPC waits without limit for a connected client that
does not read, and calls need no deadline: its request would occupy a place for ever.
"""

ResultT = TypeVar("ResultT")
Context = aio.ServicerContext[Any, Any]


class InferenceServer:
    """Serves a handler over gRPC, together with the standard health service.

    Call ``start`` and ``stop`` on the event loop that shall run the connections and the handler.
    """

    def __init__(
        self,
        handler: InferenceHandler,
        address: str,
        *,
        options: ChannelOptions | None = None,
        admit: Admitter | None = None,
        on_refused: Refused | None = None,
        has_reflection: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> None:
        """Makes a server that does not listen yet.

        Args:
            options: ``max_receive_bytes`` bounds a request; larger ones get RESOURCE_EXHAUSTED.
            admit: lets calls in by their metadata, before their message is received; default: all, to
                ``handler``.
            on_refused: called for calls that are not let in, and for malformed messages.
            has_reflection: True: the services describe themselves, to anybody.
            max_calls: calls of all services and states at a time; more get RESOURCE_EXHAUSTED.

        Raises:
            ConfigError: the address is not valid.
        """
        self._admit: Admitter = admit or (lambda _: nullcontext(PlainCall(handler)))
        self._max_calls = max_calls
        self._on_refused = on_refused or (lambda _, __: None)
        self._address = parse_address(address)
        self._options = options or ChannelOptions()
        self._has_reflection = has_reflection
        self._health = Health(INFERENCE_SERVICE)
        self._server: aio.Server | None = None

    @property
    def address(self) -> str:
        """Address of the server; after ``start`` with the real port."""
        return self._address.target

    async def start(self, *, is_ready: bool = True, look: Look | None = None) -> str:
        """Starts serving; returns the address.

        Args:
            is_ready: the initial health status.
            look: see ``Health.attach``.

        Raises:
            ConfigError: the address is in use, not writable, or not of this machine.
        """
        server = aio.server(
            options=self._options.for_server(),
            compression=grpc.Compression.NoCompression,
            interceptors=(OpenCalls(f"/{INFERENCE_SERVICE}/Generate"),),
            maximum_concurrent_rpcs=self._max_calls,
        )
        await self._health.attach(server, look)
        server.add_generic_rpc_handlers((self._handlers(),))
        if self._has_reflection:
            # The names are looked up among the generated messages, which the codec has imported.
            names = (INFERENCE_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self._address = bind(server, self._address, self._options)
        self._server = server
        await server.start()
        await self._health.set_serving(is_ready)
        return self.address

    async def set_ready(self, is_ready: bool) -> None:
        """Sets the health status, for a handler that knows more than that the port is open."""
        await self._health.set_serving(is_ready)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Sets NOT_SERVING, then lets running requests end within ``grace_s`` seconds; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.stop()
        await server.stop(grace_s)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # No (de)serialisers: messages stay bytes, so that this code answers broken ones. Streams of requests,
        # though each call has one: gRPC receives the message of a unary call before it reports the call.
        return grpc.method_handlers_generic_handler(
            INFERENCE_SERVICE,
            {
                "Generate": grpc.stream_stream_rpc_method_handler(self._serve_generate),
                "Info": grpc.stream_stream_rpc_method_handler(self._serve_info),
            },
        )

    async def _serve_generate(self, _: object, context: Context) -> None:
        async def work() -> None:
            timeout_s = context.time_remaining()
            with ExitStack() as stack:
                with self._refusing("Generate"):
                    entry = stack.enter_context(self._admit(_incoming("Generate", context)))
                    params = replace(
                        await entry.receive(read_message(context), decode_generate_request),
                        timeout_s=timeout_s,
                        traceparent="".join(_metadata(context, "traceparent")[:1]),
                        client_request_id="".join(_metadata(context, "x-request-id")[:1]),
                    )
                await _pump(entry.handler, params, context.write)

        await _answer(context, work())

    async def _serve_info(self, _: object, context: Context) -> None:
        async def work() -> None:
            with ExitStack() as stack:
                with self._refusing("Info"):
                    entry = stack.enter_context(self._admit(_incoming("Info", context)))
                    await entry.receive(read_message(context), bytes)
                await _written(context.write(encode_service_info(await entry.handler.info())))

        await _answer(context, work())

    @contextmanager
    def _refusing(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._on_refused(method, error)
            raise


def _incoming(method: str, context: Context) -> Incoming:
    return Incoming(method, _metadata(context, "authorization"), context.time_remaining())


def _metadata(context: Context, wanted: str) -> list[str]:
    return [str(value) for name, value in context.invocation_metadata() or () if name == wanted]


async def _pump(
    handler: InferenceHandler, params: GenerateParams, write: Callable[[bytes], Awaitable[None]]
) -> None:
    events = handler.generate(params)
    try:
        async for event in events:
            await _written(write(encode_generate_event(event)))
    finally:
        # Only generators have aclose; closing here, not at garbage collection, ends the work of a lost
        # client.
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _written(writing: Awaitable[None]) -> None:
    """Waits until the client takes a message.

    Raises:
        DeadlineExceededError: it takes too long. A client that reads later gets this after the messages.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writing
    except TimeoutError:
        raise DeadlineExceededError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None


async def _answer(context: Context, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    try:
        return await work
    except Exception as error:
        status = status_of(error)
        await context.abort(status.code, status.details, status.metadata)
