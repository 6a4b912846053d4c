"""Several models in one service on Ray: each exact with its own draft, loaded, unloaded and lost alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from specray.bench.compare.peers.process import free_port
from specray.config import parse_config
from specray.serving.launch import running_service
from tests.e2e.calls import DEADLINE_S, eventually
from tests.e2e.service import ENGINE, Service, processes, reload
from tests.processes import is_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROMPT = "def fibonacci(n):\n"
OTHER = {**ENGINE, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def several() -> Iterator[Service]:
    config = parse_config(
        {
            "models": [
                {"name": "pooled", "aliases": ["first"], "target": ENGINE, "draft": {"pool": "shared"}},
                {"name": "own", "target": OTHER, "draft": ENGINE},
                {"name": "plain", "target": OTHER, "draft": {"enabled": False}, "load": "demand"},
            ],
            "drafts": [{"name": "shared", **ENGINE}],
            "speculation": {"num_speculative_tokens": 4, "overlap": "auto"},
            "router": {"round_timeout_s": 2.0, "start_timeout_s": 180},
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
        }
    )
    with running_service(config):
        yield Service(config, f"http://127.0.0.1:{config.http.port}", f"127.0.0.1:{config.grpc.port}")


@pytest.fixture
async def http(several: Service) -> Any:
    timeout = aiohttp.ClientTimeout(total=3 * DEADLINE_S)
    async with aiohttp.ClientSession(several.url, timeout=timeout) as session:
        yield session


async def text_of(http: aiohttp.ClientSession, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"])


async def states(http: aiohttp.ClientSession) -> dict[str, str]:
    async with http.get("/v1/models") as response:
        return {entry["id"]: entry["status"]["value"] for entry in (await response.json())["data"]}


async def num_drafted(http: aiohttp.ClientSession, application: str) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "specray_spec_decode_num_draft_tokens_by_source_total{"
    wanted = [line for line in lines if line.startswith(name) and f'application="{application}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted if 'source="model"' in line)


async def test_all_models_say_the_same_and_each_with_its_draft(http: aiohttp.ClientSession) -> None:
    assert await states(http) == {"pooled": "loaded", "first": "loaded", "own": "loaded", "plain": "unloaded"}
    texts = [await text_of(http, name) for name in ("pooled", "own", "first", "plain")]
    # The three are the same target: with a pool's draft, with its own, and without one.
    assert len(set(texts)) == 1 and texts[0]
    assert await num_drafted(http, "specray-pooled") > 0
    assert await num_drafted(http, "specray-own") > 0
    assert await num_drafted(http, "specray-plain") == 0
    assert (await states(http))["plain"] == "loaded"
    async with http.get("/v1/models/own") as response:
        # Measured: a Router, a rank and a draft. The estimate is 2.7.
        assert 0.3 < (await response.json())["status"]["memory_gib"] < 2.0


async def test_one_model_takes_new_values_while_all_serve(
    http: aiohttp.ClientSession, several: Service
) -> None:
    expected = await text_of(http, "own")
    key = "speculation__num_speculative_tokens"
    code, said, errors = await reload(several, **{f"models__own__{key}": 0})
    assert (code, said) == (0, "models.own.speculation.num_speculative_tokens: 4 -> 0\n"), errors
    before = [await num_drafted(http, f"specray-{name}") for name in ("own", "pooled")]
    assert [await text_of(http, name) for name in ("own", "pooled")] == [expected, expected]
    after = [await num_drafted(http, f"specray-{name}") for name in ("own", "pooled")]
    assert after[0] == before[0] and after[1] > before[1]
    code, _, errors = await reload(several, **{key: 2})
    assert code == 2 and f"allowed: models.NAME.{key.replace('__', '.')} of pooled, own, plain" in errors


async def test_an_unload_and_a_crash_of_one_disturb_no_other(http: aiohttp.ClientSession) -> None:
    expected = await text_of(http, "own")
    failures: list[str] = []
    is_over = asyncio.Event()

    async def ask_without_end() -> None:
        while not is_over.is_set():
            try:
                assert await text_of(http, "own") == expected
            except AssertionError as error:
                failures.append(str(error))
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask_without_end())
    async with http.post("/v1/models/unload", json={"model": "plain"}) as response:
        assert (response.status, (await response.json())["value"]) == (200, "unloaded")
    assert (await states(http))["plain"] == "unloaded"
    # The rank of one target of the two that are left; its Router starts another.
    ranks = processes("ray::TargetRank")
    assert len(ranks) == 2
    async with http.get("/v1/models/pooled") as response:
        assert response.status == 200
    assert await text_of(http, "plain") == expected
    (new,) = set(processes("ray::TargetRank")) - set(ranks)
    os.kill(new, signal.SIGKILL)
    await eventually(lambda: not is_running(new), "the rank of plain has ended")
    assert await text_of(http, "plain") == expected
    is_over.set()
    await asking
    assert failures == []


async def test_the_owner_of_models_may_die(http: aiohttp.ClientSession) -> None:
    expected = await text_of(http, "own")
    (owner,) = processes("ray::ServeReplica:specray:Models")
    assert (await states(http))["own"] == "loaded"
    os.kill(owner, signal.SIGKILL)
    assert await text_of(http, "own") == expected
    async with http.get("/ready") as response:
        assert response.status == 200, "loaded models serve on without an owner"

    async def is_replaced() -> bool:
        return bool(set(processes("ray::ServeReplica:specray:Models")) - {owner})

    await eventually(is_replaced, "another owner has started")

    async def knows() -> bool:
        try:
            return (await states(http))["own"] == "loaded"
        except (KeyError, aiohttp.ClientError):
            return False

    await eventually(knows, "it knows what is loaded")
    async with http.post("/v1/models/unload", json={"model": "pooled"}) as response:
        assert response.status == 200, await response.text()
    # With the last of its models the shared draft goes, too, and comes back with it.
    assert await text_of(http, "pooled") == expected
