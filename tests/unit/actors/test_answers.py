"""Errors of a Router that are meant for its caller travel as answers, and everything else as an exception."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from typing import Any

import pytest

from specray.actors.answers import error_as_value, raise_if_error
from specray.actors.client import ServeRouterClient
from specray.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    SpecrayError,
)
from specray.requests import GenerateRequest
from specray.types import SamplingParams

REQUEST = GenerateRequest("a", (1,), SamplingParams(), 8)


class Replica:
    """A Router deployment whose ``complete`` ends with an error, as a replica and its handle at once."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.complete = self

    def remote(self, _: GenerateRequest) -> Replica:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> object:
        return pickle.loads(pickle.dumps(await error_as_value(self._fail())))

    async def _fail(self) -> object:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceededError("the time of 1 s ended after 3 tokens"),
        OverloadedError("full", 2.5),
        InvalidRequestError("stop is wrong", field="stop"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_error_for_the_caller_is_an_answer_and_raised_on_its_side(error: SpecrayError) -> None:
    handle: Any = Replica(error)
    with pytest.raises(type(error)) as raised:
        await ServeRouterClient(handle, timeout_s=60).complete(REQUEST)
    assert raised.value.__dict__ == error.__dict__
    assert str(raised.value) == str(error)


async def test_a_bug_is_raised_where_it_is() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await error_as_value(fail())


def test_answers_without_error_are_themselves() -> None:
    assert raise_if_error(None) is None
    assert raise_if_error("text") == "text"
