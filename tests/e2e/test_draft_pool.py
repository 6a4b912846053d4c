"""Two drafts on a Ray node of their own: they die, hang, become another model, and are lost with their node.

The service is deployed from a configuration of Serve's, as a cluster's is, so that one deployment of it can
be changed while it runs.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from specray.bench.soak.faults import OTHER_DRAFT, inject, prepare
from specray.bench.soak.schedule import FaultKind, PlannedFault
from specray.bench.testbed.beds import Bed, open_bed
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.parts import Part, PartRole, of_role
from specray.config import parse_config
from tests.e2e.calls import (
    DEADLINE_S,
    drafted_by_the_model,
    eventually,
    metric,
    samples,
    speculates,
    streamed,
    text_of,
)
from tests.processes import is_running

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # One loop for the service and for all who ask it.
    pytest.mark.asyncio(loop_scope="module"),
]

LONG: dict[str, Any] = {
    "prompt": "class Stack:\n    def push(self, item):\n", "max_tokens": 120, "ignore_eos": True
}  # fmt: skip
GREEDY: dict[str, Any] = {**LONG, "temperature": 0}
COUPLED: dict[str, Any] = {**LONG, "temperature": 1, "seed": 3}
PLAIN = {"speculation": {"enabled": False}}
"""What the target says alone."""
REQUEST_S = 2 * DEADLINE_S
PERIOD_S = 0.5
"""Seconds between two looks; each may be a request, which takes the processor time that starts need."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bed]:
    directory: Path = tmp_path_factory.mktemp("bed")
    # Its streams, over unix sockets, ask for a secret: without it no draft would be of use.
    secret = directory / "secret"
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
            "speculation": {"num_speculative_tokens": 4, "overlap": "auto"},
            "router": {"round_timeout_s": 2.0, "start_timeout_s": 120},
            "rpc": {"secret_file": str(secret)},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        # A worker for each of a node's eight logical CPUs would be started and never used.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        async with open_bed(BedKind.CLUSTER, config, directory=directory) as bed:
            yield bed


@pytest_asyncio.fixture(loop_scope="module")
async def http(bed: Bed) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(bed.url, timeout=timeout) as http:
        yield http


async def parts(bed: Bed, role: PartRole) -> tuple[Part, ...]:
    return of_role(await bed.control.parts(), role)


async def draft_in_use(bed: Bed, http: aiohttp.ClientSession) -> Part:
    """Returns the draft that the router leases."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        used = {
            sample.labels["replica"]
            for sample in await samples(http)
            if sample.name == "specray_draft_replica_routers" and sample.value
        }
        found = [part for part in await parts(bed, PartRole.DRAFT) if part.replica in used]
        if len(used) == len(found) == 1:
            return found[0]
        await asyncio.sleep(0.2)
    raise AssertionError(f"not one draft is in use: {used}")


async def test_another_draft_takes_over_from_one_that_dies(bed: Bed, http: aiohttp.ClientSession) -> None:
    expected = await text_of(http, **GREEDY, **PLAIN)
    assert await speculates(http)
    used = await draft_in_use(bed, http)
    lost = await metric(http, "specray_draft_lost_total")
    assert await streamed(http, lambda: os.kill(used.pid, signal.SIGKILL), **GREEDY) == (expected, None)
    await eventually(lambda: speculates(http), "another draft is leased", period_s=PERIOD_S)
    assert await metric(http, "specray_draft_lost_total") == lost + 1
    assert await draft_in_use(bed, http) != used


async def test_another_draft_takes_over_from_one_that_hangs_and_it_is_replaced(
    bed: Bed, http: aiohttp.ClientSession
) -> None:
    expected = await text_of(http, **COUPLED, **PLAIN)
    await eventually(lambda: speculates(http), "a draft is leased", period_s=PERIOD_S)
    process = (await draft_in_use(bed, http)).pid
    try:
        stopped = streamed(http, lambda: os.kill(process, signal.SIGSTOP), **COUPLED)
        assert await stopped == (expected, None)
        await eventually(lambda: speculates(http), "another draft is leased", period_s=PERIOD_S)
        await eventually(lambda: not is_running(process), "the process that hangs is ended")
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


async def test_drafts_become_another_model_while_requests_run(bed: Bed, http: aiohttp.ClientSession) -> None:
    expected = await text_of(http, **COUPLED, **PLAIN)
    await eventually(lambda: speculates(http), "a draft is leased", period_s=PERIOD_S)
    await prepare(bed, [FaultKind.DRAFT_UPGRADE])
    others = [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT]
    names = ("specray_draft_lost_total", "specray_target_lost_total", "specray_requests_total")
    lost, target_lost, requests = [await metric(http, name) for name in names]
    upgrade = PlannedFault(FaultKind.DRAFT_UPGRADE, 0.0)
    upgrading = asyncio.ensure_future(inject(bed, upgrade, random.Random(0)))
    num_answers = 0
    while not upgrading.done() or num_answers < 2:
        assert await streamed(http, **COUPLED) == (expected, None)
        num_answers += 1
    done = await upgrading
    # The router leases a draft of the new model.
    assert done.what == f"the draft is {OTHER_DRAFT}" and not done.killed
    assert await speculates(http)
    assert await metric(http, "specray_draft_moves_total") >= 1
    assert await metric(http, "specray_draft_lost_total") == lost, "it was left before it ended"
    assert await metric(http, "specray_target_lost_total") == target_lost
    assert await metric(http, "specray_requests_total") >= requests + num_answers
    assert [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT] == others
    assert await text_of(http, **COUPLED, **PLAIN) == expected


async def test_a_node_that_is_lost_with_all_drafts_costs_no_token_and_others_come(
    bed: Bed, http: aiohttp.ClientSession
) -> None:
    assert bed.nodes is not None
    expected = await text_of(http, **COUPLED, **PLAIN)
    await eventually(lambda: speculates(http), "a draft is leased", period_s=PERIOD_S)
    lost = await parts(bed, PartRole.DRAFT)
    (router,) = await parts(bed, PartRole.ROUTER)
    assert router.node_id not in {part.node_id for part in lost}
    assert await streamed(http, bed.nodes.remove, **COUPLED) == (expected, None)
    assert await text_of(http, **COUPLED) == expected

    await bed.nodes.add()
    before = await drafted_by_the_model(http)

    async def is_drafted_for() -> bool:
        assert await text_of(http, **COUPLED) == expected
        return await drafted_by_the_model(http) > before

    await eventually(is_drafted_for, "a draft came back", period_s=PERIOD_S)
    found = await parts(bed, PartRole.DRAFT)
    assert found
    assert {part.actor_id for part in found}.isdisjoint(part.actor_id for part in lost)
    assert await parts(bed, PartRole.ROUTER) == (router,)
