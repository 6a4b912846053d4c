"""Tests of a target and a draft of two ranks each, served by Ray: the tokens are those of the whole model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from ray import serve
from transformers import AutoModelForCausalLM

from specray.demo.paths import demo_target_path
from specray.rpc.inference.client import SpecrayClient
from specray.serving.launch import APP_NAME
from specray.tokenization import load_tokenizer
from tests.e2e.service import DEADLINE_S, Service, complete, is_running, processes

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = "def fibonacci(n):\n"
NUM_TOKENS = 48
LONG: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 120, "temperature": 1, "seed": 3, "ignore_eos": True
}  # fmt: skip
DRAFT_RANK = "ray::DraftRank"
DRAFT_REPLICA = "ray::ServeReplica:specray:Draft"


async def streamed(
    http: aiohttp.ClientSession, service: Service, disturb: Callable[[], Awaitable[None]]
) -> str:
    """Returns the text of a stream that is disturbed at its second chunk."""
    pieces: list[str] = []
    task = None
    async with http.post(
        "/v1/completions", json={"model": service.model, "stream": True, **LONG}
    ) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 2:
                    task = asyncio.create_task(disturb())
    assert task is not None
    await task
    return "".join(pieces)


async def num_drafted_by_the_model(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "specray_spec_decode_num_draft_tokens_by_source_total{"
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'source="model"' in line
    )


async def speculates(http: aiohttp.ClientSession, service: Service) -> bool:
    before = await num_drafted_by_the_model(http)
    await complete(http, service, prompt=PROMPT, max_tokens=24)
    return await num_drafted_by_the_model(http) > before


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.3)


async def whole(http: aiohttp.ClientSession, service: Service) -> str:
    answer = await complete(http, service, **LONG, speculation={"enabled": False})
    return str(answer["choices"][0]["text"])


async def test_two_ranks_serve_the_tokens_of_one(service: Service, http: aiohttp.ClientSession) -> None:
    answer = await complete(
        http, service, prompt=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, return_speculation_metrics=True
    )
    tokenizer = load_tokenizer(demo_target_path())
    prompt = tokenizer.encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(demo_target_path(), dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    assert answer["choices"][0]["text"] == tokenizer.decode(output[0, len(prompt) :].tolist())
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert await num_drafted_by_the_model(http) > 0
    assert len(processes(DRAFT_RANK)) == 1, "the other rank is the replica itself"


async def test_all_ranks_of_a_draft_get_another_model(
    service: Service, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await eventually(lambda: speculates(http, service), "a draft is leased")
    expected = await whole(http, service)
    other = tmp_path / "other-draft"
    shutil.copytree(demo_target_path(), other)
    [rank], [replica] = processes(DRAFT_RANK), processes(DRAFT_REPLICA)
    # What Serve calls when the deployment's user_config has changed.
    draft: Any = serve.get_deployment_handle("Draft", APP_NAME)
    await draft.reconfigure.remote({"draft": {}})
    assert [rank] == processes(DRAFT_RANK), "nothing has changed"

    async def change() -> None:
        await draft.reconfigure.remote({"draft": {"model": str(other)}})

    assert await streamed(http, service, change) == expected

    async def is_used() -> bool:
        async with SpecrayClient(service.grpc_address) as client:
            return (await client.info()).draft_model == other.name

    await eventually(is_used, "the router leases the new draft")
    assert await speculates(http, service)
    assert not is_running(rank)
    assert len(processes(DRAFT_RANK)) == 1
    assert processes(DRAFT_REPLICA) == [replica]


async def test_a_draft_with_a_lost_rank_is_replaced_and_no_token_changes(
    service: Service, http: aiohttp.ClientSession
) -> None:
    expected = await whole(http, service)
    await eventually(lambda: speculates(http, service), "a draft is leased")
    [rank], [replica] = processes(DRAFT_RANK), processes(DRAFT_REPLICA)
    killed_s = 0.0

    async def kill() -> None:
        nonlocal killed_s
        os.kill(rank, signal.SIGKILL)
        killed_s = time.monotonic()

    assert await streamed(http, service, kill) == expected

    async def is_replaced() -> bool:
        return processes(DRAFT_RANK) not in ([], [rank]) and not is_running(replica)

    await eventually(is_replaced, "another replica starts, with a rank of its own")
    print(f"replaced {time.monotonic() - killed_s:.2f} s after a rank was killed")
    # A replica that is killed takes its ranks along.
    [replica], ranks = processes(DRAFT_REPLICA), processes(DRAFT_RANK)
    os.kill(replica, signal.SIGKILL)

    async def are_gone() -> bool:
        return not any(is_running(each) for each in ranks)

    await eventually(are_gone, "ranks end with their replica")
