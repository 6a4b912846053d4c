"""Two Ray nodes: the draft's is lost whole amid a request, another comes, and changes its model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specray.bench.load.client import ServerClient
from specray.bench.load.scrape import parse_samples
from specray.bench.soak.faults import OTHER_DRAFT, inject, prepare
from specray.bench.soak.schedule import FaultKind, PlannedFault
from specray.bench.soak.watch import DRAFTS, total
from specray.bench.testbed.beds import Bed, open_bed
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.parts import PartRole, of_role
from specray.config import parse_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

DEADLINE_S = 90.0


@pytest.fixture
async def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bed]:
    # A worker for each of a node's eight logical CPUs would be started and never used.
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    engine = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}
    config = parse_config(
        {
            "target": engine,
            "draft": engine,
            "speculation": {"num_speculative_tokens": 4, "overlap": "auto"},
            "router": {"round_timeout_s": 2.0, "start_timeout_s": 120},
        }
    )
    async with open_bed(BedKind.CLUSTER, config, directory=tmp_path) as bed:
        yield bed


async def drafts_counted(http: ServerClient) -> float:
    return total(parse_samples(await http.metrics_text()), DRAFTS, source="model") or 0.0


async def test_a_lost_draft_node_and_an_upgraded_draft_cost_no_token_and_speculation_is_back(
    bed: Bed,
) -> None:
    body = {
        "model": bed.config.model_name, "prompt": "class Stack:\n    def push(self, item):\n",
        "max_tokens": 400, "temperature": 1, "seed": 5, "ignore_eos": True,
    }  # fmt: skip
    assert bed.nodes is not None
    async with ServerClient(bed.url, timeout_s=DEADLINE_S) as http:
        undisturbed = await http.complete({**body, "speculation": {"enabled": False}})
        (lost,) = of_role(await bed.control.parts(), PartRole.DRAFT)
        (router,) = of_role(await bed.control.parts(), PartRole.ROUTER)
        assert lost.node_id != router.node_id

        pieces: list[str] = []
        removal: asyncio.Task[None] | None = None
        async for event in http.stream_completion(body):
            pieces.append(event.text)
            if len(pieces) == 2:
                removal = asyncio.ensure_future(bed.nodes.remove())
        assert "".join(pieces) == undisturbed["choices"][0]["text"]
        assert removal is not None
        await removal
        without = await http.complete(body)
        assert without["choices"] == undisturbed["choices"]

        await bed.nodes.add()
        before, end_s = await drafts_counted(http), time.monotonic() + DEADLINE_S
        while await drafts_counted(http) <= before:
            assert time.monotonic() < end_s, "no draft came back"
            answer = await http.complete(body)
            assert answer["choices"] == undisturbed["choices"]
        (found,) = of_role(await bed.control.parts(), PartRole.DRAFT)
        assert found.actor_id != lost.actor_id

        await prepare(bed, [FaultKind.DRAFT_UPGRADE])
        others = [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT]
        upgrade = PlannedFault(FaultKind.DRAFT_UPGRADE, 0.0)
        done, answer = await asyncio.gather(inject(bed, upgrade, random.Random(0)), http.complete(body))
        assert done.what == f"the draft is {OTHER_DRAFT}" and not done.killed
        assert answer["choices"] == undisturbed["choices"]
        before = await drafts_counted(http)
        answer = await http.complete(body)
        assert answer["choices"] == undisturbed["choices"]
        assert await drafts_counted(http) > before
        assert [part for part in await bed.control.parts() if part.role is not PartRole.DRAFT] == others
