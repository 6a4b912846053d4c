"""Serve's choice of a Router: who is told what, and when one Router alone has nobody who chooses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from specray.actors.client import ServeRouterClient
from specray.actors.routing import router_choice, routes_by_prefix
from specray.config import parse_config
from specray.errors import OverloadedError
from specray.requests import FinishReason, GenerateRequest, OutputChunk, RouterLoad
from specray.routing import Choice, SharedChoice
from specray.types import SamplingParams

REQUEST = GenerateRequest("a", tuple(range(100)), SamplingParams(), max_tokens=4)
LOAD = RouterLoad(1, num_places=4, prefill_tokens_per_s=100.0, step_s=0.1, num_cache_tokens=1024)


@pytest.mark.parametrize(
    ("router", "chosen"),
    [
        ({}, False),
        ({"num_replicas": 2}, True),
        ({"num_replicas": 2, "routing": "load"}, False),
        ({"autoscaling": {"min_replicas": 1, "max_replicas": 3}}, True),
        ({"autoscaling": {"min_replicas": 1, "max_replicas": 1}}, False),
    ],
)
def test_somebody_chooses_only_where_there_may_be_several_routers(router: Any, chosen: bool) -> None:
    config = parse_config({"router": router})
    assert routes_by_prefix(config) is chosen
    assert bool(router_choice(config)) is chosen


def test_older_figures_of_a_router_do_not_replace_newer_ones() -> None:
    shared = SharedChoice()
    shared.on_routers({"x": replace(LOAD, number=5), "y": replace(LOAD, number=1)})
    shared.on_routers(
        {"x": replace(LOAD, number=4, num_running=4), "y": replace(LOAD, number=2, num_running=4)}
    )
    assert shared.choose(REQUEST, ["x", "y"]) == ["x", "y"]


def test_a_router_that_leaves_takes_what_was_known_of_it_along() -> None:
    shared = SharedChoice()
    shared.on_routers({"x": LOAD, "y": replace(LOAD, num_running=4)})
    assert shared.num_routers == 2
    assert shared.choose(REQUEST, ["x", "y"])[0] == "x"
    shared.on_chunk(OutputChunk("a", (1,)))
    shared.on_routers({"y": LOAD})
    shared.on_routers({"x": None, "y": LOAD})
    shared.choose(replace(REQUEST, request_id="b"), ["x", "y"])
    assert shared.last[-1].num_expected_tokens == 0


class Routers:
    """A Router deployment: the choice says who is asked, and some refuse."""

    def __init__(self, shared: SharedChoice, names: list[str], refusing: set[str]) -> None:
        self.complete = self
        self.asked: list[str] = []
        self._shared, self._names, self._refusing = shared, names, refusing

    def remote(self, request: GenerateRequest) -> Any:
        return self._answer(request)

    async def _answer(self, request: GenerateRequest) -> Any:
        router = self._shared.choose(request, self._names)[0]
        self.asked.append(router)
        await asyncio.sleep(0)
        if router in self._refusing:
            return OverloadedError("full", 2.0)
        return OutputChunk(request.request_id, (1,), finish_reason=FinishReason.LENGTH, load=LOAD)


def _client(num_routers: int, refusing: set[str]) -> tuple[ServeRouterClient, Routers, list[Choice]]:
    shared, names = SharedChoice(), [f"r{index}" for index in range(num_routers)]
    shared.on_routers(dict.fromkeys(names, LOAD))
    handle: Any = Routers(shared, names, refusing)
    choices: list[Choice] = []
    client = ServeRouterClient(
        handle, timeout_s=9, choice=shared, on_choice=lambda choice, _: choices.append(choice)
    )
    return client, handle, choices


async def test_a_request_that_is_refused_is_sent_to_one_other_router() -> None:
    client, handle, choices = _client(2, {"r0"})
    for number in range(4):
        await client.complete(replace(REQUEST, request_id=str(number)))
    # It counts as full from then on.
    assert handle.asked.count("r0") <= 1
    assert [choice.router for choice in choices] == ["r1"] * 4


async def test_the_second_refusal_is_the_callers() -> None:
    client, handle, choices = _client(3, {"r0", "r1", "r2"})
    with pytest.raises(OverloadedError, match="full"):
        await client.complete(REQUEST)
    assert len(set(handle.asked)) == 2 and not choices


async def test_the_only_router_refuses_once() -> None:
    client, handle, _ = _client(1, {"r0"})
    with pytest.raises(OverloadedError, match="full"):
        await client.complete(REQUEST)
    assert handle.asked == ["r0"]
