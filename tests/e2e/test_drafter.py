"""A drafter in the draft's actor, to which the target's features go: the text over HTTP is the target's own.

One beside the target takes the same way but for the draft: see ``tests/unit/actors/drafts``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.calls import DEADLINE_S
from tests.e2e.service import ENGINE, Service, processes, started
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model, write_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def service(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    drafter = write(tmp_path_factory.mktemp("eagle"), *official(eagle3_weights()))
    sections = {**ENGINE, "model": str(target), "drafter": str(drafter), "max_model_len": 128}
    with started(
        target=sections,
        draft={"model": "remote-features", "max_model_len": 128},
        speculation={"num_speculative_tokens": 3, "fallback": "none"},
    ) as one:
        yield one


async def completions(service: Service, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            common = {"model": service.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            async with session.post(f"{service.url}/v1/completions", json=common | body) as response:
                assert response.status == 200, await response.text()
                answer: dict[str, Any] = await response.json()
                return answer

        return await asyncio.gather(*map(ask, bodies))


async def test_the_text_is_the_targets_and_rounds_carry_draft_tokens(service: Service, target: Path) -> None:
    wanted = reference_greedy(reference_model(target), PROMPT, NUM_TOKENS)
    greedy = {"temperature": 0, "return_token_ids": True, "return_speculation_metrics": True}
    (answer,) = await completions(service, greedy)
    [choice] = answer["choices"]
    assert choice["token_ids"] == wanted
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] >= NUM_TOKENS / 2


async def test_sampled_text_does_not_depend_on_the_drafter(service: Service) -> None:
    sampled = {"temperature": 2.0, "seed": 7, "return_token_ids": True, "return_speculation_metrics": True}
    plain = {**sampled, "speculation": {"enabled": False}}
    with_drafts, without = await completions(service, sampled, plain)
    assert with_drafts["choices"][0]["token_ids"] == without["choices"][0]["token_ids"]
    assert with_drafts["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert without["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


async def test_a_draft_that_was_killed_comes_back_from_the_prompts_features(
    service: Service, target: Path
) -> None:
    wanted = reference_greedy(reference_model(target), PROMPT, NUM_TOKENS)
    [killed] = processes("ray::ServeReplica:specray:Draft")
    asked = {"temperature": 0, "return_token_ids": True, "return_speculation_metrics": True}
    running = asyncio.create_task(completions(service, *[asked] * 8))
    await asyncio.sleep(0.05)
    os.kill(killed, signal.SIGKILL)
    assert [each["choices"][0]["token_ids"] for each in await running] == [wanted] * 8
    end = time.monotonic() + DEADLINE_S
    while True:
        (answer,) = await completions(service, asked)
        assert answer["choices"][0]["token_ids"] == wanted
        figures = answer["metrics"]["speculative_decoding"]
        if figures["num_draft_tokens"] >= NUM_TOKENS / 2 and killed not in processes("ray::"):
            return
        assert time.monotonic() < end, "no other draft has drafted"
        await asyncio.sleep(0.5)
