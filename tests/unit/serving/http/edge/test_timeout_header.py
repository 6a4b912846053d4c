"""The deadline of a call in its header, beside the one in its body."""

from __future__ import annotations

from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.serving.http.edge.body import with_timeout
from tests.unit.serving.http.service import REPLY, TEXT, say, serving


@pytest.mark.parametrize(
    ("header", "own", "got"),
    [
        (None, 3, 3),
        ("2.5", None, 2.5),
        ("2.5", 3, 2.5),
        ("2.5", 2, 2),
        ("0", None, None),
        ("-1", 3, 3),
        ("inf", None, 86_400),
        ("1e9", None, 86_400),
        ("2.5", "x", "x"),
    ],
)
def test_header_and_field_together_mean_the_shorter_time(header: str | None, own: Any, got: Any) -> None:
    headers = {} if header is None else {"X-Request-Timeout-Seconds": header}
    values = {"prompt": "a"} if own is None else {"prompt": "a", "timeout_s": own}
    result = with_timeout(values, headers)
    assert isinstance(result, dict)
    assert result.get("timeout_s") == got


@pytest.mark.parametrize("text", ["soon", "nan", ""])
def test_header_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="X-Request-Timeout-Seconds") as caught:
        with_timeout({}, {"X-Request-Timeout-Seconds": text})
    assert caught.value.field == "X-Request-Timeout-Seconds"


async def test_header_reaches_the_router() -> None:
    router = say(REPLY)
    async with serving(router) as service:
        headers = {"X-Request-Timeout-Seconds": "12"}
        async with service.http.post("/v1/completions", json=TEXT, headers=headers) as response:
            assert response.status == 200
    timeout_s = router.requests[0].timeout_s
    assert timeout_s is not None and 11.0 < timeout_s < 12.0, "a part of it is over"
