"""Reads JSON bodies and checks their content type, size, encoding and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from specray.serving.http.problems import HttpError

BODY_TIMEOUT_S = 60.0
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes up to which a body that is too long is read to its end, so that the client gets to read the
answer."""
_DISCARD_TIMEOUT_S = 10.0


async def read_json(request: Request, *, max_body_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> object:
    """Reads and decodes a JSON body.

    Raises:
        HttpError: 415 for another content type, 413 for a body that is too long, 408 for one that does not
            come, 400 for one that is not JSON in UTF-8.
        ClientDisconnect: the client left.
    """
    _check_content_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_body_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {timeout_s:g} s", code="timeout") from None
    return _decode(body)


def _check_content_type(request: Request) -> None:
    header = request.headers.get("content-type", "")
    kind = header.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            415,
            f"content-type is {header[:100]!r}; allowed: application/json",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_body_bytes: int) -> bytes:
    body = bytearray()
    async for chunk, has_more in _chunks(request):
        body += chunk
        if len(body) > max_body_bytes:
            if has_more:
                await _discard(request)
            raise HttpError(
                413, f"the body is too long; allowed: {max_body_bytes} bytes", code="request_too_large"
            )
    return bytes(body)


async def _discard(request: Request) -> None:
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            async for chunk, _ in _chunks(request):
                num_bytes += len(chunk)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return


async def _chunks(request: Request) -> AsyncIterator[tuple[bytes, bool]]:
    """Yields the parts of the body, and whether more follow. Raises ClientDisconnect."""
    has_more = True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = message.get("more_body", False)
        yield message.get("body", b""), has_more


def _decode(body: bytes) -> object:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HttpError(
            400, f"the body is not UTF-8: byte {error.start} is invalid", code="invalid_utf8"
        ) from None
    try:
        # Unlike the standard library's parser, this one refuses lone surrogates and deep nesting.
        values: object = from_json(body)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return values
