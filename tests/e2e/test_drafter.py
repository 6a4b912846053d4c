"""A service whose target drafts for itself: what is asked over HTTP is the target's own text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.service import DEADLINE_S, ENGINE, Service, started
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model, write_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

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
        target=sections, draft={"num_replicas": 1}, speculation={"num_speculative_tokens": 3}
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


async def test_metrics_count_its_tokens_apart(service: Service) -> None:
    await completions(service, {"temperature": 0})
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/metrics") as response:
        text = await response.text()
    assert "specray_spec_decode_num_draft_tokens_by_source_total{" in text and 'source="features"' in text
