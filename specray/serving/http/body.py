"""Reads the bodies of calls: their content type, size, pace and encoding."""

from __future__ import annotations

import asyncio
import contextlib

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from specray.serving.admission.places import Place
from specray.serving.http.problems import HttpError

_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes up to which a body that is too long is read to its end, so that the client gets to read the
answer."""
_DISCARD_TIMEOUT_S = 10.0


async def read_body(request: Request, receive: Receive, place: Place, *, max_bytes: int) -> bytes:
    """Reads a body of JSON; one that says that it is too long, or is of another type, is not read.

    Raises:
        HttpError: 415 for another content type, 413 for a body that is too long, 408 for one that comes too
            slowly.
        OverloadedError, DeadlineExceededError: see ``Place.receive``.
        ClientDisconnect: the client left.
    """
    _check_content_type(request)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_long(max_bytes)
    body = bytearray()
    try:
        has_more = True
        while has_more:
            message = await place.receive(receive())
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            place.hold(len(part))
            body += part
            if len(body) > max_bytes:
                raise _too_long(max_bytes)
            has_more = message.get("more_body", False)
    except TimeoutError:
        raise HttpError(408, f"the body came too slowly: {len(body)} bytes", code="timeout") from None
    return bytes(body)


async def discard(receive: Receive) -> None:
    """Reads what still comes of a body, for a while, so that its client gets to read the answer."""
    num_bytes, has_more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            while has_more and num_bytes <= _MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                has_more = message.get("more_body", False)


def decode(body: bytes) -> object:
    """Decodes a JSON body. Raises HttpError: 400 if it is not JSON in UTF-8."""
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


def _check_content_type(request: Request) -> None:
    header = request.headers.get("content-type", "")
    kind = header.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            415,
            f"content-type is {header[:100]!r}; allowed: application/json",
            code="unsupported_media_type",
        )


def _too_long(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is too long; allowed: {max_bytes} bytes", code="request_too_large")
