"""Reads a request's deadline from a header, for clients and gateways that do not write the body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from specray.errors import InvalidRequestError, shown
from specray.serving.validation import RANGES

TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
"""Name of the header; Serve's proxy uses the same name and applies it, too."""
_FIELD: Final = "timeout_s"


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
