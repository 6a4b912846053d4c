"""Two drafts and their router over real Ray and HTTP: drafts that die, hang, or become another model.

The service is deployed from a configuration of Serve's, as a cluster's is, so that one deployment of it can
be changed while it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from specray.bench.compare.peers.process import free_port
from specray.config import Config, parse_config
from specray.demo.paths import demo_draft_path
from specray.rpc.inference.client import SpecrayClient
from specray.serving.launch import APP_NAME
from specray.serving.ray_nodes import chosen_agent_ports, lean_head
from tests.e2e.service import DEADLINE_S, Service, complete, is_running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = "class Stack:\n    def push(self, item):\n"
START_TIMEOUT_S = 120.0
HEALTH = {"health_check_period_s": 1, "health_check_timeout_s": 2}
"""Health checks in seconds: a draft that hangs is replaced after three, in half the time of users."""
GREEDY: dict[str, Any] = {"temperature": 0}
COUPLED: dict[str, Any] = {"temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # Its streams, over unix sockets, ask for a secret: without it no draft would be of use.
    secret: Path = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("a secret of this test")
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "num_threads": 1,
        "profile_s": 0.1,
    }
    config = parse_config(
        {
            "target": engine,
            "draft": {**engine, "num_replicas": 2},
            "speculation": {"num_speculative_tokens": 4},
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
            "router": {"start_timeout_s": START_TIMEOUT_S},
            "rpc": {"secret_file": str(secret)},
        }
    )
    with chosen_agent_ports(), lean_head(log_to_driver=False):
        # "local": never the cluster of a test beside this one, which leaves a note for all.
        ray.init(
            "local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
            logging_level="WARNING",
        )  # fmt: skip
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": config.http.port})
        deploy(config, user_config=None)
        yield Service(
            config=config,
            url=f"http://127.0.0.1:{config.http.port}",
            grpc_address=f"127.0.0.1:{config.grpc.port}",
        )
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(config: Config, *, user_config: dict[str, Any] | None) -> None:
    """Deploys as ``serve deploy`` does, which needs Ray's dashboard; returns when all parts run."""
    application: dict[str, Any] = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": "specray.serving.app:build_app",
        "args": config.model_dump(mode="json", exclude_unset=True),
    }
    draft = {"name": "Draft", **HEALTH} | ({} if user_config is None else {"user_config": user_config})
    application["deployments"] = [draft]
    schema = ServeDeploySchema.model_validate({"applications": [application]})
    client: Any = _get_global_client()
    client.deploy_apps(schema)
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        status = serve.status().applications.get(APP_NAME)
        if status is not None:
            assert status.status is not ApplicationStatus.DEPLOY_FAILED, status.message
            if status.status is ApplicationStatus.RUNNING:
                return
        assert time.monotonic() < end, status
        time.sleep(0.5)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=2 * DEADLINE_S)
    async with aiohttp.ClientSession(service.url, timeout=timeout) as session:
        yield session


async def metric(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
    assert values, f"/metrics has no {name}"
    return sum(values)


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.1)


async def draft_in_use() -> int:
    """Returns the process of the draft that the router leases."""
    handle: Any = serve.get_deployment_handle("Draft", APP_NAME)
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        offers = await asyncio.gather(*(handle.lease.remote() for _ in range(6)))
        used = {offer.pid for offer in offers if offer.num_routers}
        if len(used) == 1:
            return int(used.pop())
        await asyncio.sleep(0.2)
    raise AssertionError(f"not one draft is in use: {offers}")


async def speculates(http: aiohttp.ClientSession, service: Service) -> bool:
    # Fallbacks draft without the model: only what the model drafted counts.
    before = await metric_by_source(http)
    await complete(http, service, prompt=PROMPT, max_tokens=24)
    return await metric_by_source(http) > before


async def metric_by_source(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "specray_spec_decode_num_draft_tokens_by_source_total{"
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'source="model"' in line
    )


async def streamed(
    http: aiohttp.ClientSession, service: Service, disturb: Callable[[], Awaitable[None]], **fields: Any
) -> tuple[str, float]:
    """Returns the text of a stream that is disturbed at its second chunk, and its longest pause in
    seconds."""
    pieces: list[str] = []
    arrived: list[float] = []
    task = None
    body = {"model": service.model, "prompt": PROMPT, "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with http.post("/v1/completions", json={**body, **fields}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                arrived.append(time.monotonic())
                if len(pieces) == 2:
                    task = asyncio.create_task(disturb())
    assert task is not None
    await task
    return "".join(pieces), max(after - before for before, after in pairwise(arrived))


async def undisturbed(http: aiohttp.ClientSession, service: Service, **fields: Any) -> str:
    answer = await complete(
        http,
        service,
        prompt=PROMPT,
        max_tokens=400,
        ignore_eos=True,
        speculation={"enabled": False},
        **fields,
    )
    text: str = answer["choices"][0]["text"]
    return text


async def test_another_draft_takes_over_from_one_that_dies(
    service: Service, http: aiohttp.ClientSession
) -> None:
    expected = await undisturbed(http, service, **GREEDY)
    assert await speculates(http, service)
    process = await draft_in_use()
    killed_s = 0.0

    async def kill() -> None:
        nonlocal killed_s
        os.kill(process, signal.SIGKILL)
        killed_s = time.monotonic()

    lost = await metric(http, "specray_draft_lost_total")
    text, pause_s = await streamed(http, service, kill, **GREEDY)
    assert text == expected
    await eventually(lambda: speculates(http, service), "another draft is leased")
    print(
        f"killed: longest pause {pause_s:.2f} s, speculation seen {time.monotonic() - killed_s:.2f} s later"
    )
    assert await metric(http, "specray_draft_lost_total") == lost + 1
    assert await draft_in_use() != process


async def test_another_draft_takes_over_from_one_that_hangs_and_it_is_replaced(
    service: Service, http: aiohttp.ClientSession
) -> None:
    expected = await undisturbed(http, service, **COUPLED)
    await eventually(lambda: speculates(http, service), "a draft is leased")
    process = await draft_in_use()
    stopped_s = 0.0

    async def stop() -> None:
        nonlocal stopped_s
        os.kill(process, signal.SIGSTOP)
        stopped_s = time.monotonic()

    try:
        text, pause_s = await streamed(http, service, stop, **COUPLED)
        assert text == expected
        await eventually(lambda: speculates(http, service), "another draft is leased")
        print(f"hung: longest pause {pause_s:.2f} s, speculation {time.monotonic() - stopped_s:.2f} s later")

        async def is_gone() -> bool:
            return not is_running(process)

        await eventually(is_gone, "the process that hangs is ended")
        print(f"hung: ended {time.monotonic() - stopped_s:.2f} s later")
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


async def test_draft_becomes_another_model_while_requests_run(
    service: Service, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    expected = await undisturbed(http, service, temperature=1, seed=5)
    await eventually(lambda: speculates(http, service), "a draft is leased")
    other = tmp_path / "other-draft"
    shutil.copytree(demo_draft_path(), other)
    started_s = time.monotonic()
    deploying = asyncio.create_task(
        asyncio.to_thread(deploy, service.config, user_config={"draft": {"model": str(other)}})
    )
    names = ("specray_draft_lost_total", "specray_target_lost_total", "specray_requests_total")
    lost, target_lost, requests = [await metric(http, name) for name in names]
    num_answers = 0
    while not deploying.done() or num_answers < 2:
        answer, _ = await streamed(http, service, lambda: asyncio.sleep(0), temperature=1, seed=5)
        assert answer == expected
        num_answers += 1
    await deploying
    print(f"upgrade: {time.monotonic() - started_s:.2f} s, {num_answers} answers meanwhile")

    async def is_used() -> bool:
        async with SpecrayClient(service.grpc_address) as client:
            return (await client.info()).draft_model == other.name

    await eventually(is_used, "the router leases the new draft")
    assert await speculates(http, service)
    assert await metric(http, "specray_draft_moves_total") >= 1
    assert await metric(http, "specray_draft_lost_total") == lost, "it was left before it ended"
    assert await metric(http, "specray_target_lost_total") == target_lost
    assert await metric(http, "specray_requests_total") >= requests + num_answers, "the router is the same"
    assert await undisturbed(http, service, temperature=1, seed=5) == expected
