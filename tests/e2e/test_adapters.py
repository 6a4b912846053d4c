"""Adapters of a real service: loaded over HTTP, swapped and unloaded under requests, lost and back.

Every answer is the merged checkpoint's, with and without drafts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import save_file

from tests.e2e.calls import DEADLINE_S, eventually
from tests.e2e.service import ENGINE, Service, processes, started
from tests.unit.engine.model.checkpoint.test_adapter import write_adapter
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model, write_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
NUM_TOKENS = 24
LONG = 100
LAYERS = {
    "sql": ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"),
    "sql-2": ("model.layers.0.self_attn.v_proj", "model.layers.2.mlp.up_proj"),
    "chat": ("model.layers.2.self_attn.o_proj", "model.layers.1.mlp.gate_proj"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def directory(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def merged(base: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The merged checkpoint of each adapter."""
    found = {"": base}
    for name, layers in LAYERS.items():
        tensors = write_adapter(directory / name, base, layers)
        found[name] = shutil.copytree(base, tmp_path_factory.mktemp(name) / "merged")
        save_file(tensors, found[name] / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def service(base: Path, directory: Path, merged: dict[str, Path]) -> Iterator[Service]:
    adapters = {"directory": str(directory), "max_loaded": 2, "max_per_step": 2}
    with started(
        target={**ENGINE, "model": str(base), "max_model_len": 128, "adapters": adapters},
        draft={**ENGINE, "model": str(base), "max_model_len": 128},
        speculation={"num_speculative_tokens": 3, "fallback": "none"},
    ) as one:
        yield one


@pytest.fixture
def wanted(merged: dict[str, Path]) -> dict[str, list[int]]:
    """The greedy answer of each adapter, and of the base."""
    return {name: reference_greedy(reference_model(path), PROMPT, LONG) for name, path in merged.items()}


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def load(http: aiohttp.ClientSession, name: str, folder: str, **fields: Any) -> int:
    status, _ = await post(http, "/v1/load_lora_adapter", lora_name=name, lora_path=folder, **fields)
    return status


async def tokens(
    http: aiohttp.ClientSession, model: str, *, max_tokens: int = NUM_TOKENS, **fields: Any
) -> tuple[list[int], int]:
    """An answer's tokens, and the draft tokens that were verified for it."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    asked |= {"return_token_ids": True, "return_speculation_metrics": True, **fields}
    status, answer = await post(http, "/v1/completions", **asked)
    assert status == 200, answer
    figures = answer["metrics"]["speculative_decoding"]
    return answer["choices"][0]["token_ids"], figures["num_draft_tokens"]


async def test_both_names_get_the_merged_models_tokens_and_the_base_its_own(
    service: Service, http: aiohttp.ClientSession, wanted: dict[str, list[int]]
) -> None:
    assert await load(http, "sql", "sql") == 200
    assert await load(http, "chat", "chat") == 200
    asked = ["sql", f"{service.model}:sql", "chat", service.model] * 2
    answers = await asyncio.gather(*(tokens(http, model) for model in asked))
    for model, (found, num_draft) in zip(asked, answers, strict=True):
        name = "" if model == service.model else model.removeprefix(f"{service.model}:")
        assert found == wanted[name][:NUM_TOKENS], model
        assert num_draft > 0
    assert len({tuple(each[:NUM_TOKENS]) for each in wanted.values()}) == 4
    async with http.get("/v1/models") as response:
        models = {each["id"]: each["parent"] for each in (await response.json())["data"]}
    assert models == {service.model: None, "sql": service.model, "chat": service.model}


async def test_sampled_tokens_are_the_same_with_and_without_drafts(http: aiohttp.ClientSession) -> None:
    await load(http, "sql", "sql", load_inplace=True)
    sampled = {"temperature": 1.5, "seed": 11}
    status, body = await post(http, "/v1/completions", model="nobody", prompt=PROMPT)
    assert (status, "'sql'" in body["error"]["message"]) == (404, True)
    drafted, plain = await asyncio.gather(
        tokens(http, "sql", **sampled), tokens(http, "sql", **sampled, speculation={"enabled": False})
    )
    assert (drafted[0], plain[1]) == (plain[0], 0)
    assert drafted[1] > 0


async def test_a_swap_and_an_unload_leave_running_requests_their_adapter(
    http: aiohttp.ClientSession, wanted: dict[str, list[int]]
) -> None:
    await load(http, "sql", "sql", load_inplace=True)
    running = [asyncio.create_task(tokens(http, "sql", max_tokens=LONG)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert await load(http, "sql", "sql-2", load_inplace=True) == 200
    assert (await tokens(http, "sql"))[0] == wanted["sql-2"][:NUM_TOKENS]
    running += [asyncio.create_task(tokens(http, "sql", max_tokens=LONG))]
    await asyncio.sleep(0.1)
    assert (await post(http, "/v1/unload_lora_adapter", lora_name="sql"))[0] == 200
    assert [(await each)[0] for each in running] == [wanted["sql"]] * 3 + [wanted["sql-2"]]
    assert (await post(http, "/v1/completions", model="sql", prompt=PROMPT))[0] == 404


async def test_more_adapters_than_fit_take_turns(
    service: Service, http: aiohttp.ClientSession, wanted: dict[str, list[int]]
) -> None:
    for name in LAYERS:
        assert await load(http, name, name, load_inplace=True) == 200
    asked = [*LAYERS, ""] * 4
    answers = await asyncio.gather(*(tokens(http, name or service.model) for name in asked))
    for name, (found, _) in zip(asked, answers, strict=True):
        assert found == wanted[name][:NUM_TOKENS], name


async def test_what_a_killed_target_has_lost_comes_back(
    http: aiohttp.ClientSession, wanted: dict[str, list[int]]
) -> None:
    await load(http, "chat", "chat", load_inplace=True)
    running = [asyncio.create_task(tokens(http, "chat", max_tokens=LONG)) for _ in range(2)]
    await asyncio.sleep(0.1)
    [rank] = processes("ray::TargetRank")
    os.kill(rank, signal.SIGKILL)
    assert [(await each)[0] for each in running] == [wanted["chat"]] * 2
    # The names, too: a Router that starts anew is told them with the requests.
    [router] = processes("ray::ServeReplica:specray:Router")
    os.kill(router, signal.SIGKILL)

    async def is_served() -> bool:
        body = {"model": "chat", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        status, _ = await post(http, "/v1/completions", **body)
        return status == 200

    await eventually(is_served, "the service is back", deadline_s=2 * DEADLINE_S)
    assert (await tokens(http, "chat"))[0] == wanted["chat"][:NUM_TOKENS]


@pytest.mark.parametrize("path", ["../base", "/etc", "nobody", ""])
async def test_a_hostile_path_is_one_sentence(http: aiohttp.ClientSession, path: str) -> None:
    status, answer = await post(http, "/v1/load_lora_adapter", lora_name="bad", lora_path=path)
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert "\n" not in answer["error"]["message"]
    assert "of adapters" in answer["error"]["message"]
    async with http.get("/v1/models") as response:
        assert "bad" not in await response.text()
