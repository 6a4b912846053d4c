"""Tests of the client's event parser, also with lines as other servers write them."""

from __future__ import annotations

import pytest

from specray.bench.load.client import _event
from specray.errors import SpecrayError


@pytest.mark.parametrize(
    "line", [b"\n", b": keep-alive\n", b":\n", b"event: x\n", b"data: [DONE]\n", b"data:\n"]
)
def test_what_is_no_event_is_passed_over(line: bytes) -> None:
    assert _event(line) is None


def test_an_event_is_its_json() -> None:
    event = _event(b'data: {"choices": [{"text": "a"}]}\n')
    assert event is not None and event.text == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'data: {"error": {"message": "full"}}\n', "full"),
        (b'error: {"code": 500, "message": "lost"}\n', "lost"),
        (b"data: half an ev\n", "not JSON: b'half an ev'"),
    ],
)
def test_an_error_ends_the_request_and_nothing_else(line: bytes, message: str) -> None:
    with pytest.raises(SpecrayError, match=message):
        _event(line)
