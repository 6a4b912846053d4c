"""Reads the bodies of calls: their content type, size, pace and encoding, and the deadline of a header."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import Final

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from specray.errors import InvalidRequestError, shown
from specray.serving.admission.places import Place
from specray.serving.problems import HttpError
from specray.serving.validation import RANGES

DISCARD_TIMEOUT_S = 10.0
TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
"""Header for clients and gateways that do not write the body. Serve's proxy applies it, too."""
SESSION_HEADER: Final = "X-Session-Id"
"""Header by which clients and gateways name what belongs together."""
_FIELD: Final = "timeout_s"
_SESSION_FIELD: Final = "prompt_cache_key"
_MAX_SESSION_CHARS: Final = 256


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
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            # Bytes up to which a body that is too long is read to its end, so that the client gets to read
            # the answer.
            while has_more and num_bytes <= 64 * 1024 * 1024:
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


def header_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Returns the header's time; None: there is none. One that is not positive means none, as in Serve.

    Raises:
        InvalidRequestError: the header is not a number.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if math.isnan(timeout_s):
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {shown(text)}; allowed: a number of seconds", field=TIMEOUT_HEADER
        )
    return min(timeout_s, RANGES[_FIELD].high) if timeout_s > 0 else None


def with_timeout(values: object, headers: Mapping[str, str]) -> object:
    """Adds the header's time to a decoded body as ``timeout_s``; if the body has one, the shorter counts.

    Raises:
        InvalidRequestError: the header is not a number.
    """
    timeout_s = header_timeout_s(headers)
    if timeout_s is None or not isinstance(values, dict):
        return values
    own = values.get(_FIELD)
    if own is not None and not isinstance(own, (int, float)):
        return values  # The schema reports the wrong type.
    if own is not None and own <= timeout_s:
        return values
    return {**values, _FIELD: timeout_s}


def with_session(values: object, headers: Mapping[str, str]) -> object:
    """Adds the session of the header to a decoded body that names none; a long one is cut."""
    session = headers.get(SESSION_HEADER)
    if not session or not isinstance(values, dict) or values.get(_SESSION_FIELD) is not None:
        return values
    return {**values, _SESSION_FIELD: session[:_MAX_SESSION_CHARS]}
