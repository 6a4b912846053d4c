"""Exceptions as HTTP answers, in the shape of the OpenAI API."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.responses import JSONResponse

from specray.errors import (
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    SpecrayError,
    UnauthenticatedError,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_LOST_S = 1.0


class HttpError(SpecrayError):
    """A request that HTTP itself refuses: its body, its type, its path."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def problem_status(error: Exception) -> int:
    """The HTTP status of an exception."""
    match error:
        case HttpError():
            return error.status
        case ModelNotFoundError():
            return 404
        case InvalidRequestError():
            return 400
        case UnauthenticatedError():
            return 401
        case OverloadedError():
            return 429
        case DeadlineExceededError():
            return 504
        case EngineLostError():
            return 503
        case _:
            return 500


def problem_body(error: Exception) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``; nothing of an unexpected exception is told."""
    status = problem_status(error)
    if not isinstance(error, SpecrayError):
        return _body(
            "internal error; the server's log has the details", "server_error", None, "internal_error"
        )
    match error:
        case HttpError():
            return _body(str(error), "invalid_request_error", None, error.code)
        case ModelNotFoundError():
            return _body(str(error), "invalid_request_error", error.field, "model_not_found")
        case InvalidRequestError():
            return _body(str(error), "invalid_request_error", error.field, "invalid_value")
        case UnauthenticatedError():
            return _body(str(error), "invalid_request_error", None, "invalid_api_key")
        case OverloadedError():
            return _body(str(error), "rate_limit_error", None, "overloaded")
        case DeadlineExceededError():
            return _body(str(error), "server_error", None, "deadline_exceeded")
        case EngineLostError():
            return _body(str(error), "server_error", None, "service_unavailable")
        case _:
            return _body(str(error), "server_error", None, f"internal_error_{status}")


def problem_code(error: Exception) -> str:
    """The exception in one word, as in the answer's body."""
    return str(problem_body(error)["error"]["code"])


def problem_response(error: Exception, *, request_id: str | None = None) -> JSONResponse:
    """The whole answer; unexpected exceptions are logged."""
    status = problem_status(error)
    if status == 500:
        logger.error("request failed", exc_info=error, extra={"request_id": request_id})
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        # OpenAI's clients look for this one first; whole seconds would send many back at the same moment.
        headers["Retry-After-Ms"] = str(math.ceil(1e3 * error.retry_after_s))
    elif status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="specray"'
    elif status == 503:
        headers["Retry-After"] = str(math.ceil(_RETRY_AFTER_LOST_S))
    if status in (408, 413):
        # The rest of the body may still be on its way; it must not be read as the next request.
        headers["Connection"] = "close"
    return JSONResponse(problem_body(error), status_code=status, headers=headers)


def problem_event(error: Exception, *, request_id: str | None = None) -> bytes:
    """The server-sent event that ends a stream after its headers have left."""
    if problem_status(error) == 500:
        logger.error("stream failed", exc_info=error, extra={"request_id": request_id})
    return b"data: " + json.dumps(problem_body(error), ensure_ascii=False).encode() + b"\n\n"


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
