"""The session of a call in its header, beside the one in its body."""

from __future__ import annotations

from typing import Any

import pytest

from specray.serving.http.edge.body import with_session
from tests.unit.serving.http.service import REPLY, TEXT, say, serving


@pytest.mark.parametrize(
    ("header", "own", "got"),
    [
        (None, "own", "own"),
        ("a", None, "a"),
        ("a", "own", "own"),
        ("", None, None),
        ("x" * 300, None, "x" * 256),
    ],
)
def test_the_bodys_session_counts_before_the_headers(header: str | None, own: Any, got: Any) -> None:
    headers = {} if header is None else {"X-Session-Id": header}
    values = {"prompt": "a"} if own is None else {"prompt": "a", "prompt_cache_key": own}
    result = with_session(values, headers)
    assert isinstance(result, dict)
    assert result.get("prompt_cache_key") == got


def test_what_is_no_object_is_left_to_the_schema() -> None:
    assert with_session([1], {"X-Session-Id": "a"}) == [1]


async def test_header_reaches_the_choice_of_a_router() -> None:
    router = say(REPLY)
    async with serving(router) as service:
        headers = {"X-Session-Id": "conversation 7"}
        async with service.http.post("/v1/completions", json=TEXT, headers=headers) as response:
            assert response.status == 200
    assert router.requests[0].session == "conversation 7"
