"""Exceptions of specray.

SpecrayError
├── ConfigError            a configuration value, file or model is wrong: shown at start, exit code 2
├── InvalidRequestError    a request is wrong: HTTP 400 (or its own status), INVALID_ARGUMENT
│   ├── ModelNotFoundError HTTP 404, NOT_FOUND
│   └── GrammarError       a grammar cannot be enforced on an engine
├── UnauthenticatedError   the caller sent no known API key: HTTP 401, UNAUTHENTICATED
├── NotAllowedError        the caller's API key may not do this: HTTP 403, PERMISSION_DENIED
├── OverloadedError        queues are full: HTTP 429 with Retry-After, RESOURCE_EXHAUSTED
├── DeadlineExceededError  the request's deadline has passed: HTTP 504, DEADLINE_EXCEEDED
├── EngineLostError        a worker died, hung or was partitioned: retriable
├── ProtocolError          a peer broke the protocol: a bug or a version mismatch
└── OutOfBlocksError       the block cache has no room for a sequence; raised before anything changed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_SHOWN_LEN: Final = 60
"""Characters of a value that an error message shows."""


class SpecrayError(Exception):
    """Base class of all exceptions that specray raises on purpose."""


class ConfigError(SpecrayError):
    """A setting is wrong; the message names it, its value and the allowed range."""


class InvalidRequestError(SpecrayError):
    """A request's field is wrong.

    Args:
        message: names the field, the value and the allowed range.
        field: name of the field as the user wrote it, for the API's ``param``.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by default, which Ray needs.
        return _rebuild_invalid_request, (type(self), str(self), self.field)


def _rebuild_invalid_request(
    cls: type[InvalidRequestError], message: str, field: str | None
) -> InvalidRequestError:
    return cls(message, field=field)


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this service does not serve."""


class GrammarError(InvalidRequestError):
    """A grammar allows no token at all, or cannot follow its own output."""

    def __init__(self, message: str, *, field: str | None = "grammar") -> None:
        super().__init__(message, field=field)


class UnauthenticatedError(SpecrayError):
    """The caller sent no key or an unknown one. The message does not repeat it."""


class NotAllowedError(SpecrayError):
    """The caller's key may not do this; the message says what a key needs for it."""


class OverloadedError(SpecrayError):
    """Queues are full; try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class DeadlineExceededError(SpecrayError):
    """A request did not complete within its own time limit or the service's."""


class EngineLostError(SpecrayError):
    """A worker cannot be reached or did not answer in time."""


class ProtocolError(SpecrayError):
    """A peer sent what the protocol forbids."""


class OutOfBlocksError(SpecrayError):
    """The block cache has no room; nothing was changed."""


def shown(value: object) -> str:
    """Returns ``repr(value)`` for an error message, cut to a readable length; no more than that is read."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _SHOWN_LEN:
            return f"{text[: _SHOWN_LEN - 3]}..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yields ``repr(value)`` bit by bit."""
    if isinstance(value, str):
        yield repr(value[: _SHOWN_LEN + 1])
    elif isinstance(value, list):
        yield "["
        for place, entry in enumerate(value):
            yield ", " if place else ""
            yield from _pieces(entry)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for place, (key, entry) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(entry)
        yield "}"
    else:
        yield repr(value)
