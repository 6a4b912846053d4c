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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from specray.bench.core.samples import parse_samples, total
from specray.bench.load.client import ServerClient
from specray.bench.soak.faults import OTHER_DRAFT, inject, prepare
from specray.bench.soak.schedule import FaultKind, PlannedFault
from specray.bench.soak.watch import DRAFTS
from specray.bench.testbed.beds import Bed, open_bed
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.parts import Part, PartRole, of_role
from specray.config import parse_config
from tests.e2e.service import DEADLINE_S, is_running

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
GREEDY: dict[str, Any] = {"temperature": 0}
COUPLED: dict[str, Any] = {"temperature": 1, "seed": 3}
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
async def http(bed: Bed) -> AsyncIterator[ServerClient]:
    async with ServerClient(bed.url, timeout_s=REQUEST_S) as http:
        yield http


async def parts(bed: Bed, role: PartRole) -> tuple[Part, ...]:
    return of_role(await bed.control.parts(), role)


async def metric(http: ServerClient, name: str, **labels: str) -> float:
    return total(parse_samples(await http.metrics_text()), name, **labels) or 0.0


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(PERIOD_S)


async def draft_in_use(bed: Bed, http: ServerClient) -> Part:
    """Returns the draft that the router leases."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        used = {
            sample.labels["replica"]
            for family in text_string_to_metric_families(await http.metrics_text())
            for sample in family.samples
            if sample.name == "specray_draft_replica_routers" and sample.value
        }
        found = [part for part in await parts(bed, PartRole.DRAFT) if part.replica in used]
        if len(used) == len(found) == 1:
            return found[0]
        await asyncio.sleep(0.2)
    raise AssertionError(f"not one draft is in use: {used}")


async def speculates(bed: Bed, http: ServerClient) -> bool:
    # Fallbacks draft without the model: only what the model drafted counts.
    before = await metric(http, DRAFTS, source="model")
    await http.complete(body(bed, **GREEDY, max_tokens=24))
    return await metric(http, DRAFTS, source="model") > before


def body(bed: Bed, **fields: Any) -> dict[str, Any]:
    return {"model": bed.config.model_name, **LONG, **fields}


async def whole(bed: Bed, http: ServerClient, **fields: Any) -> str:
    answer = await http.complete(body(bed, **fields))
    return str(answer["choices"][0]["text"])


_undisturbed: dict[str, str] = {}


async def undisturbed(bed: Bed, http: ServerClient, **fields: Any) -> str:
    """The target's text alone, written once for all tests."""
    key = str(fields)
    if key not in _undisturbed:
        _undisturbed[key] = await whole(bed, http, **fields, speculation={"enabled": False})
    return _undisturbed[key]


async def streamed(
    bed: Bed, http: ServerClient, disturb: Callable[[], Awaitable[None]], **fields: Any
) -> tuple[str, float]:
    """Returns the text of a stream that is disturbed at its second chunk, and its longest pause in
    seconds."""
    pieces: list[str] = []
    arrived: list[float] = []
    task = None
    async for event in http.stream_completion(body(bed, **fields)):
        pieces.append(event.text)
        arrived.append(time.monotonic())
        if len(pieces) == 2:
            task = asyncio.ensure_future(disturb())
    assert task is not None
    await task
    return "".join(pieces), max(after - before for before, after in pairwise(arrived))


async def test_another_draft_takes_over_from_one_that_dies(bed: Bed, http: ServerClient) -> None:
    expected = await undisturbed(bed, http, **GREEDY)
    assert await speculates(bed, http)
    used = await draft_in_use(bed, http)
    killed_s = 0.0

    async def kill() -> None:
        nonlocal killed_s
        os.kill(used.pid, signal.SIGKILL)
        killed_s = time.monotonic()

    lost = await metric(http, "specray_draft_lost_total")
    text, pause_s = await streamed(bed, http, kill, **GREEDY)
    assert text == expected
    await eventually(lambda: speculates(bed, http), "another draft is leased")
    print(
        f"killed: longest pause {pause_s:.2f} s, speculation seen {time.monotonic() - killed_s:.2f} s later"
    )
    assert await metric(http, "specray_draft_lost_total") == lost + 1
    assert await draft_in_use(bed, http) != used


async def test_another_draft_takes_over_from_one_that_hangs_and_it_is_replaced(
    bed: Bed, http: ServerClient
) -> None:
    expected = await undisturbed(bed, http, **COUPLED)
    await eventually(lambda: speculates(bed, http), "a draft is leased")
    process = (await draft_in_use(bed, http)).pid
    stopped_s = 0.0

    async def stop() -> None:
        nonlocal stopped_s
        os.kill(process, signal.SIGSTOP)
        stopped_s = time.monotonic()

    try:
        text, pause_s = await streamed(bed, http, stop, **COUPLED)
        assert text == expected
        await eventually(lambda: speculates(bed, http), "another draft is leased")
        print(f"hung: longest pause {pause_s:.2f} s, speculation {time.monotonic() - stopped_s:.2f} s later")

        async def is_gone() -> bool:
            return not is_running(process)

        await eventually(is_gone, "the process that hangs is ended")
        print(f"hung: ended {time.monotonic() - stopped_s:.2f} s later")
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


async def test_drafts_become_another_model_while_requests_run(bed: Bed, http: ServerClient) -> None:
    expected = await undisturbed(bed, http, **COUPLED)
    await eventually(lambda: speculates(bed, http), "a draft is leased")
    await prepare(bed, [FaultKind.DRAFT_UPGRADE])
    others = [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT]
    names = ("specray_draft_lost_total", "specray_target_lost_total", "specray_requests_total")
    lost, target_lost, requests = [await metric(http, name) for name in names]
    started_s = time.monotonic()
    upgrade = PlannedFault(FaultKind.DRAFT_UPGRADE, 0.0)
    upgrading = asyncio.ensure_future(inject(bed, upgrade, random.Random(0)))
    num_answers = 0
    while not upgrading.done() or num_answers < 2:
        answer, _ = await streamed(bed, http, lambda: asyncio.sleep(0), **COUPLED)
        assert answer == expected
        num_answers += 1
    done = await upgrading
    print(f"upgrade: {time.monotonic() - started_s:.2f} s, {num_answers} answers meanwhile")
    # The router leases a draft of the new model.
    assert done.what == f"the draft is {OTHER_DRAFT}" and not done.killed
    assert await speculates(bed, http)
    assert await metric(http, "specray_draft_moves_total") >= 1
    assert await metric(http, "specray_draft_lost_total") == lost, "it was left before it ended"
    assert await metric(http, "specray_target_lost_total") == target_lost
    assert await metric(http, "specray_requests_total") >= requests + num_answers
    assert [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT] == others
    assert await whole(bed, http, **COUPLED, speculation={"enabled": False}) == expected


async def test_a_node_that_is_lost_with_all_drafts_costs_no_token_and_others_come(
    bed: Bed, http: ServerClient
) -> None:
    assert bed.nodes is not None
    expected = await undisturbed(bed, http, **COUPLED)
    await eventually(lambda: speculates(bed, http), "a draft is leased")
    lost = await parts(bed, PartRole.DRAFT)
    (router,) = await parts(bed, PartRole.ROUTER)
    assert router.node_id not in {part.node_id for part in lost}
    text, _ = await streamed(bed, http, bed.nodes.remove, **COUPLED)
    assert text == expected
    assert await whole(bed, http, **COUPLED) == expected

    await bed.nodes.add()
    before, end_s = await metric(http, DRAFTS, source="model"), time.monotonic() + DEADLINE_S
    while await metric(http, DRAFTS, source="model") <= before:
        assert time.monotonic() < end_s, "no draft came back"
        assert await whole(bed, http, **COUPLED) == expected
        await asyncio.sleep(PERIOD_S)
    found = await parts(bed, PartRole.DRAFT)
    assert found
    assert {part.actor_id for part in found}.isdisjoint(part.actor_id for part in lost)
    assert await parts(bed, PartRole.ROUTER) == (router,)
