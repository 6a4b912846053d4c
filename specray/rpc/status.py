"""Conversion of specray's errors to gRPC statuses and back."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

import grpc
from grpc import aio

from specray.errors import (
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    ModelNotFoundError,
    NotAllowedError,
    OverloadedError,
    SpecrayError,
    UnauthenticatedError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER: Final = "retry-after"
"""Key of trailing metadata of RESOURCE_EXHAUSTED: whole seconds, as in HTTP."""
FIELD: Final = "field"
"""Key of trailing metadata of INVALID_ARGUMENT and NOT_FOUND: name of the wrong field."""
MAX_DETAILS_CHARS: Final = 1024
"""Maximum characters of a status text. It is sent in HTTP/2 headers, which peers limit to 8 KiB or more."""


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """Final status of a call."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: Exception, *, logs: bool = True) -> RpcStatus:
    """Status for a caller; unexpected errors are logged and not described to it."""
    match error:
        case ModelNotFoundError():
            return RpcStatus(grpc.StatusCode.NOT_FOUND, _details(error), _field(error))
        case InvalidRequestError():
            return RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, _details(error), _field(error))
        case UnauthenticatedError():
            return RpcStatus(grpc.StatusCode.UNAUTHENTICATED, _details(error))
        case NotAllowedError():
            return RpcStatus(grpc.StatusCode.PERMISSION_DENIED, _details(error))
        case OverloadedError():
            seconds = str(max(1, math.ceil(error.retry_after_s)))
            return RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, _details(error), ((RETRY_AFTER, seconds),))
        case DeadlineExceededError():
            return RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, _details(error))
        case EngineLostError():
            return RpcStatus(grpc.StatusCode.UNAVAILABLE, _details(error))
        case _:
            if logs:
                logger.error("a call failed", exc_info=error)
            return RpcStatus(grpc.StatusCode.INTERNAL, "internal error")


def error_of(error: aio.AioRpcError) -> SpecrayError:
    """Rebuilds the error that the server's handler raised from its status."""
    details = error.details() or error.code().name
    metadata = dict(error.trailing_metadata() or ())
    field = metadata.get(FIELD)
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details, field=_text(field))
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFoundError(details, field=_text(field))
        case grpc.StatusCode.RESOURCE_EXHAUSTED if RETRY_AFTER in metadata:
            return OverloadedError(details, float(_text(metadata[RETRY_AFTER]) or 1.0))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InvalidRequestError(details)
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(details)
        case grpc.StatusCode.PERMISSION_DENIED:
            return NotAllowedError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(details)
        case grpc.StatusCode.UNAVAILABLE:
            return EngineLostError(f"{error.code().name}: {details}")
        case code:
            return SpecrayError(f"{code.name}: {details}")


def _details(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_DETAILS_CHARS else text[: MAX_DETAILS_CHARS - 1] + "…"


def _field(error: InvalidRequestError) -> tuple[tuple[str, str], ...]:
    # Metadata values are ASCII.
    if error.field is None or not error.field.isascii() or not error.field.isprintable():
        return ()
    return ((FIELD, error.field[:MAX_DETAILS_CHARS]),)


def _text(value: str | bytes | None) -> str | None:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
