"""What a gateway in front says of a call in headers: tenant, priority and the times that are wanted.

The names are those of Gateway API Inference Extension and llm-d. Any client can write them, so they count
only where ``http.trust_gateway`` says that nobody else reaches the service, and a body's own values go before
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from specray.errors import InvalidRequestError, shown

FAIRNESS_HEADERS: Final = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
"""Headers that name a tenant; the first that is there counts."""
OBJECTIVE_HEADER: Final = "x-gateway-inference-objective"
"""Header that names an objective, for which ``http.gateway_objectives`` has a priority."""
_LEVEL_HEADERS: Final = {"ttft_ms": "x-slo-ttft-ms", "itl_ms": "x-slo-tpot-ms"}


def with_gateway(values: object, headers: Mapping[str, str], objectives: Mapping[str, int]) -> object:
    """Adds what a trusted gateway says to a decoded body. An objective that is not known says nothing.

    Raises:
        InvalidRequestError: a time is not a number.
    """
    if not isinstance(values, dict):
        return values
    values = dict(values)
    tenant = next((headers[name] for name in FAIRNESS_HEADERS if headers.get(name)), None)
    if tenant is not None:
        _add(values, "speculation", {"tenant": tenant})
    priority = objectives.get(headers.get(OBJECTIVE_HEADER, ""))
    if priority is not None and values.get("priority") is None:
        values["priority"] = priority
    level = {field: _number(headers, name) for field, name in _LEVEL_HEADERS.items() if headers.get(name)}
    if level:
        _add(values, "slo", level)
    return values


def _add(values: dict[str, Any], name: str, entries: Mapping[str, object]) -> None:
    """Adds the entries that the object under ``name`` does not have."""
    own = values.get(name) or {}
    if isinstance(own, dict):
        values[name] = {**entries, **{key: value for key, value in own.items() if value is not None}}


def _number(headers: Mapping[str, str], name: str) -> float:
    try:
        number = float(headers[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequestError(
            f"{name} is {shown(headers[name])}; allowed: a number of milliseconds", field=name
        )
    return number
