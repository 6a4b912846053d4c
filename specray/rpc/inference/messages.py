"""Receives the messages of calls within a bounded time, and bounds the calls that no quota counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from grpc import aio

from specray.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, SpecrayError
from specray.rpc.inference.types import InferenceHandler
from specray.rpc.status import status_of

MESSAGE_TIMEOUT_S: Final = 30.0
"""Seconds from the beginning of a call to the end of its message."""
MAX_OPEN_CALLS: Final = 256
"""Calls that no quota of a key counts; the oldest goes for a new one."""

_DISPLACED: Final = OverloadedError(f"{MAX_OPEN_CALLS} newer calls are open; allowed: {MAX_OPEN_CALLS}")

MessageT = TypeVar("MessageT")
ParamsT = TypeVar("ParamsT")
Context = aio.ServicerContext[Any, Any]
Handler = Any
"""A grpc.RpcMethodHandler, whose type knows no asynchronous ones."""


async def in_time(message: Awaitable[MessageT]) -> MessageT:
    """Waits for a message. Raises DeadlineExceededError."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            return await message
    except TimeoutError:
        raise DeadlineExceededError(f"no message came within {MESSAGE_TIMEOUT_S:g} s") from None


async def read_message(context: Context) -> Any:
    """Receives the one message of a call. Raises InvalidRequestError if its client sends none."""
    message = await context.read()
    if message is aio.EOF:
        raise InvalidRequestError("the call has no message; allowed: one")
    return message


@dataclass(frozen=True, slots=True)
class PlainCall:
    """types.AdmittedCall of a call that takes no place: only the time of its message is bounded."""

    handler: InferenceHandler

    async def receive(self, message: Awaitable[bytes], decode: Callable[[bytes], ParamsT]) -> ParamsT:
        return decode(await in_time(message))


class OpenCalls(aio.ServerInterceptor):
    """Bounds in time and number the calls of all methods but one; other services answer without a key.

    Args:
        counted: path of the method whose calls have places and count for their key.
    """

    def __init__(self, counted: str) -> None:
        self._counted = counted
        self._open: dict[asyncio.Timeout, None] = {}
        """What ends each call, the oldest first."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See aio.ServerInterceptor."""
        handler: Handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == self._counted:
            return handler  # None: there is no such method.

        async def serve(_: object, context: Context) -> None:
            try:
                await self._bounded(_answer(handler, context))
            except (TimeoutError, SpecrayError) as error:
                status = status_of(error if isinstance(error, SpecrayError) else _DISPLACED)
                await context.abort(status.code, status.details)

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )

    async def _bounded(self, answer: Awaitable[None]) -> None:
        """Raises TimeoutError when a newer call needs the place."""
        async with asyncio.timeout(None) as end:
            try:
                self._open[end] = None
                if len(self._open) > MAX_OPEN_CALLS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    oldest.reschedule(0.0)
                await answer
            finally:
                self._open.pop(end, None)


async def _answer(handler: Handler, context: Context) -> None:
    if handler.stream_stream is not None:
        answers = handler.stream_stream(_messages(context), context)
    else:
        message = await in_time(read_message(context))
        if handler.unary_unary is not None:
            await context.write(await handler.unary_unary(message, context))
            return
        answers = handler.unary_stream(message, context)
    if isinstance(answers, AsyncIterator):
        async for answer in answers:
            await context.write(answer)
    else:
        await answers


async def _messages(context: Context) -> AsyncIterator[Any]:
    while (message := await in_time(context.read())) is not aio.EOF:
        yield message
