"""Hooks of schemathesis: outputs stay short, and the check is that no answer is an error of the service."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 4
"""Most output tokens of a case."""
MAX_CHOICES = 3
_LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
"""Fields that bound the output, by the path of the operation."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Bounds an output that would be long; what is refused anyway stays as it is."""
    body, field = case.body, _LENGTHS.get(case.operation.path)
    if field is None or not isinstance(body, dict):
        return
    lengths = [name for name in (field, "max_completion_tokens") if name in body] or [field]
    for name in lengths:
        length = body.get(name)
        if length is None or (isinstance(length, int) and length > MAX_TOKENS):
            body[name] = MAX_TOKENS
    choices = body.get("n")
    if isinstance(choices, int) and choices > MAX_CHOICES:
        body["n"] = MAX_CHOICES


@schemathesis.check
def no_fault(context: Any, response: Any, case: Any) -> None:
    """Every status below 500 will do, and 504 where the case itself asked for a deadline."""
    body = case.body if isinstance(case.body, dict) else {}
    if response.status_code == 504 and "timeout_s" in body:
        return
    assert response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
