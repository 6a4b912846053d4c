"""Answers of a Router to calls through a Serve handle, among them the errors that are meant for its caller.

Serve logs a traceback of whatever a replica raises. A deadline that is over, a full queue or a wrong request
is no fault of the replica, and at ten times the load there are thousands of them; so such an error is the
answer, and the caller's side raises it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from specray.errors import SpecrayError

T = TypeVar("T")


async def error_as_value(work: Awaitable[T]) -> T | SpecrayError:
    """Awaits ``work``, and returns the error that it raises on purpose."""
    try:
        return await work
    except SpecrayError as error:
        # Its traceback would be pickled as text of no use, and keep the frames' objects until then.
        return error.with_traceback(None)


def raise_if_error(answer: Any) -> Any:
    """Returns an answer of ``error_as_value``, or raises the error that it is."""
    if isinstance(answer, SpecrayError):
        raise answer
    return answer
