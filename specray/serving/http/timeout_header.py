"""The deadline of a request as a header, for clients and gateways that do not write its body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from specray.errors import InvalidRequestError
from specray.serving.validation import RANGES, shown

TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
"""The name is that of Serve's proxy, which keeps it as well where there is one."""
_FIELD: Final = "timeout_s"


def with_timeout(values: object, headers: Mapping[str, str]) -> object:
    """A decoded body with the header's time as its ``timeout_s``; where it has one too, the shorter counts.

    As for Serve, a time that is not positive means none.

    Raises:
        InvalidRequestError: the header holds no number.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None or not isinstance(values, dict):
        return values
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if math.isnan(timeout_s):
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {shown(text)}; allowed: a number of seconds", field=TIMEOUT_HEADER
        )
    own = values.get(_FIELD)
    if timeout_s <= 0 or (isinstance(own, (int, float)) and own <= timeout_s):
        return values
    if own is not None and not isinstance(own, (int, float)):
        return values  # Wrong; the schema says so.
    return {**values, _FIELD: min(timeout_s, RANGES[_FIELD].high)}
