"""Turns exceptions into HTTP answers, in the format of the OpenAI API; Anthropic's paths have Anthropic's."""

from __future__ import annotations

import logging
import math
from typing import Any, Final, NamedTuple

from starlette.responses import JSONResponse
from starlette.types import Scope

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
from specray.serving.validation import ContextLengthError

logger = logging.getLogger(__name__)

_MESSAGES_PATH: Final = "/v1/messages"
"""Path below which answers have Anthropic's form."""
_ANTHROPIC_STATUS: Final = {503: 529}
"""Statuses that Anthropic's API has another one for."""
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types of errors in Anthropic's API by status; others: invalid_request_error, api_error from 500 on."""


class HttpError(SpecrayError):
    """A request that HTTP itself refuses, for its body, its content type or its path."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Problem(NamedTuple):
    status: int
    kind: str
    code: str


# The first class that fits counts: special ones stand before general ones.
_PROBLEMS: Final = (
    (ModelNotFoundError, _Problem(404, "invalid_request_error", "model_not_found")),
    (ContextLengthError, _Problem(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequestError, _Problem(400, "invalid_request_error", "invalid_value")),
    (UnauthenticatedError, _Problem(401, "invalid_request_error", "invalid_api_key")),
    (NotAllowedError, _Problem(403, "invalid_request_error", "not_allowed")),
    (OverloadedError, _Problem(429, "rate_limit_error", "overloaded")),
    (DeadlineExceededError, _Problem(504, "server_error", "deadline_exceeded")),
    (EngineLostError, _Problem(503, "server_error", "service_unavailable")),
    (SpecrayError, _Problem(500, "server_error", "internal_error_500")),
    (Exception, _Problem(500, "server_error", "internal_error")),
)


def problem_status(error: Exception) -> int:
    return _problem(error).status


def problem_body(error: Exception) -> dict[str, Any]:
    """Returns ``{"error": {message, type, param, code}}``; hides the text of an unexpected exception."""
    problem = _problem(error)
    is_ours = isinstance(error, SpecrayError)
    message = str(error) if is_ours else "internal error; the server's log has the details"
    field = error.field if isinstance(error, InvalidRequestError) else None
    return {"error": {"message": message, "type": problem.kind, "param": field, "code": problem.code}}


def problem_code(error: Exception) -> str:
    return _problem(error).code


def anthropic_problem_body(error: Exception, *, request_id: str | None = None) -> dict[str, Any]:
    """Returns ``{"type": "error", "error": {type, message}, "request_id"}``; it hides what ours hides."""
    status = _anthropic_status(error)
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = problem_body(error)["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def problem_response(error: Exception, scope: Scope, *, request_id: str | None = None) -> JSONResponse:
    """Returns the whole answer in the form of the API that was asked; logs an unexpected exception."""
    status, body = problem_status(error), problem_body(error)
    log_problem(error, request_id=request_id)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        # OpenAI's clients read this header first; whole seconds would send many of them back at the same
        # moment.
        headers["Retry-After-Ms"] = str(math.ceil(1e3 * error.retry_after_s))
    elif status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="specray"'
    elif status == 503:
        headers["Retry-After"] = "1"
    if status in (408, 413):
        # The rest of the body may still be on its way, and must not be read as the next request.
        headers["Connection"] = "close"
    if is_anthropic_path(scope["path"].removeprefix(scope.get("root_path", ""))):
        status, body = _anthropic_status(error), anthropic_problem_body(error, request_id=request_id)
    return JSONResponse(body, status_code=status, headers=headers)


def log_problem(error: Exception, *, request_id: str | None = None) -> None:
    if problem_status(error) == 500:
        logger.error("request failed", exc_info=error, extra={"request_id": request_id})


def is_anthropic_path(path: str) -> bool:
    return path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")


def _anthropic_status(error: Exception) -> int:
    status = problem_status(error)
    return _ANTHROPIC_STATUS.get(status, status)


def _problem(error: Exception) -> _Problem:
    if isinstance(error, HttpError):
        return _Problem(error.status, "invalid_request_error", error.code)
    return next(problem for kind, problem in _PROBLEMS if isinstance(error, kind))
