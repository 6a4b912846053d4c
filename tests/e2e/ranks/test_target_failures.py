"""Tests of ranks and Routers that die or hang under load: users see a pause, and the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ray import serve

from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.types import GenerateParams
from specray.serving.app import bind_app
from specray.serving.launch import APP_NAME, wait_running
from tests.e2e.calls import PROMPT, complete, eventually, streamed, text_of
from tests.e2e.ranks.service import TENSOR_PARALLEL_SIZE
from tests.e2e.service import Service, processes
from tests.processes import is_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
FIELDS: dict[str, Any] = {
    "max_tokens": 64, "temperature": 1, "seed": 3, "ignore_eos": True
}  # fmt: skip
LONG: dict[str, Any] = {**FIELDS, "max_tokens": 240}
"""Fields of requests that still run when Serve has begun to replace their Router."""
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 40, "maxItems": 40}},
    "required": ["names"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, Any] = {
    "max_tokens": 48,
    "temperature": 1,
    "seed": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}},
}
RANK = "ray::TargetRank"
DRAFT_RANK = "ray::DraftRank"
ROUTER_REPLICA = "ray::ServeReplica:specray:Router"


@pytest.fixture
async def patient(service: Service) -> Any:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, timeout=timeout) as session:
        yield session


async def status(http: aiohttp.ClientSession, path: str) -> int:
    async with http.get(path) as response:
        return response.status


async def structured(http: aiohttp.ClientSession, **options: Any) -> str:
    """An output under a grammar, too long to be over before anything is lost."""
    answer = await complete(http, **STRUCTURED, **options)
    text = str(answer["choices"][0]["text"])
    assert text.startswith("{") and '"names"' in text
    return text


_baselines: list[str] = []


async def baselines(http: aiohttp.ClientSession) -> tuple[str, str]:
    """What nothing disturbs: the text, and the one under a grammar; written once for all tests."""
    if not _baselines:
        _baselines.append(await text_of(http, **FIELDS))
        _baselines.append(await structured(http, speculation={"enabled": False}))
    text, under_grammar = _baselines
    return text, under_grammar


def leader_first(ranks: list[int]) -> list[int]:
    """Sorts the leader first: it has a socket where it listens for its Router."""
    listening = {
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "/target-" in line and line.split()[5] == "01"
    }

    def is_leader(process: int) -> bool:
        links = [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
        return any(link.removeprefix("socket:[").removesuffix("]") in listening for link in links)

    return sorted(ranks, key=is_leader, reverse=True)


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 0), (signal.SIGSTOP, 1)],
    ids=["leader killed", "follower killed", "leader hangs", "follower hangs"],
)
async def test_a_lost_rank_is_a_pause_and_no_token_changes(
    service: Service, patient: aiohttp.ClientSession, number: signal.Signals, rank: int
) -> None:
    undisturbed, plain_under_grammar = await baselines(patient)
    before = leader_first(processes(RANK))
    assert len(before) == TENSOR_PARALLEL_SIZE
    router = processes(ROUTER_REPLICA)
    disturbed = streamed(patient, lambda: os.kill(before[rank], number), **FIELDS)
    stream = asyncio.create_task(disturbed)
    under_grammar = asyncio.create_task(structured(patient))

    async def is_unready() -> bool:
        return await status(patient, "/ready") == 503

    await eventually(is_unready, "the loss is noticed", deadline_s=DEADLINE_S)
    assert await status(patient, "/health") == 200
    waiting = asyncio.create_task(text_of(patient, **FIELDS))
    assert await stream == (undisturbed, None)
    assert await waiting == undisturbed
    assert await under_grammar == plain_under_grammar
    assert await status(patient, "/ready") == 200
    assert processes(ROUTER_REPLICA) == router, "the Router has lived on"
    assert len(processes(RANK)) == TENSOR_PARALLEL_SIZE
    assert not any(is_running(process) for process in before), "a lost group leaves nobody behind"


async def test_a_lost_router_is_a_pause_and_no_token_changes(
    service: Service, patient: aiohttp.ClientSession
) -> None:
    undisturbed, plain_under_grammar = await baselines(patient)
    ranks, (router,) = processes(RANK), processes(ROUTER_REPLICA)
    has_begun = asyncio.Event()

    async def over_grpc() -> str:
        text = ""
        params = GenerateParams(text=PROMPT, max_tokens=240, temperature=1, seed=3, ignore_eos=True)
        async with SpecrayClient(service.grpc_address) as client:
            async for event in client.generate(params, timeout_s=DEADLINE_S):
                text += event.text
                has_begun.set()
        return text

    rpc = asyncio.create_task(over_grpc())
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    unary = asyncio.create_task(text_of(patient, **FIELDS))
    under_grammar = asyncio.create_task(structured(patient))
    killed = streamed(patient, lambda: os.kill(router, signal.SIGKILL), **FIELDS)
    assert await killed == (undisturbed, None)
    assert (await rpc).startswith(undisturbed)
    assert await unary == undisturbed
    assert await under_grammar == plain_under_grammar

    async def are_gone() -> bool:
        return not any(is_running(process) for process in ranks)

    await eventually(are_gone, "ranks end with their Router", deadline_s=DEADLINE_S)
    assert await streamed(patient, **FIELDS) == (undisturbed, None)
    assert processes(ROUTER_REPLICA) != [router]
    assert len(processes(RANK)) == TENSOR_PARALLEL_SIZE


async def test_a_router_that_is_replaced_finishes_its_requests(
    service: Service, patient: aiohttp.ClientSession
) -> None:
    undisturbed = await text_of(patient, **LONG)
    (router,), drafts = processes(ROUTER_REPLICA), processes(DRAFT_RANK)
    # The service stays the same, and so does its claim to its ports.
    handle = serve.get_app_handle(APP_NAME)
    store = (await asyncio.to_thread(lambda: handle.served.remote().result(timeout_s=30.0))).store
    changed = service.config.model_copy(
        update={
            "router": service.config.router.model_copy(update={"trace_events": 10}),
            # As `specray serve` chooses: the Ingress is replaced, too, and others need its HTTP after this.
            "http": service.config.http.model_copy(update={"server": "ingress"}),
        }
    )

    def replace() -> None:
        serve.run_many(
            [serve.RunTarget(bind_app(changed, store=store), name=APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    streams = [asyncio.create_task(streamed(patient, **LONG)) for _ in range(3)]
    assert await streamed(patient, replace, **LONG) == (undisturbed, None)
    assert await asyncio.gather(*streams) == [(undisturbed, None)] * 3

    async def is_replaced() -> bool:
        return processes(ROUTER_REPLICA) not in ([], [router])

    await eventually(is_replaced, "another Router is there", deadline_s=DEADLINE_S)
    assert processes(DRAFT_RANK) == drafts != [], "the draft is the same"
    # Other modules use this service next.
    await asyncio.to_thread(wait_running, threading.Event(), timeout_s=DEADLINE_S)
