"""Tests of a target and a draft of two ranks each, served by Ray: the tokens are those of the whole model."""

from __future__ import annotations

import os
import shutil
import signal
import time
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
from tests.e2e.calls import PROMPT, complete, drafted_by_the_model, eventually, speculates, streamed, text_of
from tests.e2e.service import Service, processes
from tests.processes import is_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS = 48
LONG: dict[str, Any] = {
    "max_tokens": 120, "temperature": 1, "seed": 3, "ignore_eos": True
}  # fmt: skip
PLAIN = {**LONG, "speculation": {"enabled": False}}
DRAFT_RANK = "ray::DraftRank"
DRAFT_REPLICA = "ray::ServeReplica:specray:Draft"


async def test_two_ranks_serve_the_tokens_of_one(service: Service, http: aiohttp.ClientSession) -> None:
    answer = await complete(http, max_tokens=NUM_TOKENS, ignore_eos=True, return_speculation_metrics=True)
    tokenizer = load_tokenizer(demo_target_path())
    prompt = tokenizer.encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(demo_target_path(), dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    assert answer["choices"][0]["text"] == tokenizer.decode(output[0, len(prompt) :].tolist())
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert await drafted_by_the_model(http) > 0
    assert len(processes(DRAFT_RANK)) == 1, "the other rank is the replica itself"


async def test_all_ranks_of_a_draft_get_another_model(
    service: Service, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await eventually(lambda: speculates(http), "a draft is leased")
    expected = await text_of(http, **PLAIN)
    other = tmp_path / "other-draft"
    shutil.copytree(demo_target_path(), other)
    [rank], [replica] = processes(DRAFT_RANK), processes(DRAFT_REPLICA)
    # What Serve calls when the deployment's user_config has changed.
    draft: Any = serve.get_deployment_handle("Draft", APP_NAME)
    await draft.reconfigure.remote({"draft": {}})
    assert [rank] == processes(DRAFT_RANK), "nothing has changed"

    async def change() -> None:
        await draft.reconfigure.remote({"draft": {"model": str(other)}})

    assert await streamed(http, change, **LONG) == (expected, None)

    async def is_used() -> bool:
        async with SpecrayClient(service.grpc_address) as client:
            return (await client.info()).draft_model == other.name

    await eventually(is_used, "the router leases the new draft")
    assert await speculates(http)
    assert not is_running(rank)
    assert len(processes(DRAFT_RANK)) == 1
    assert processes(DRAFT_REPLICA) == [replica]


async def test_a_draft_with_a_lost_rank_is_replaced_and_no_token_changes(
    service: Service, http: aiohttp.ClientSession
) -> None:
    expected = await text_of(http, **PLAIN)
    await eventually(lambda: speculates(http), "a draft is leased")
    [rank], [replica] = processes(DRAFT_RANK), processes(DRAFT_REPLICA)
    killed_s = 0.0

    async def kill() -> None:
        nonlocal killed_s
        os.kill(rank, signal.SIGKILL)
        killed_s = time.monotonic()

    assert await streamed(http, kill, **LONG) == (expected, None)

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
