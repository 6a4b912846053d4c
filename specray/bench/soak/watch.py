"""Watches a service from outside during a soak: its metrics, its parts, its memory."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from specray.bench.core.samples import Samples, parse_samples, total
from specray.bench.load.client import ServerClient
from specray.bench.soak.memory import MemoryRecord, Sample, anonymous_bytes, process_name
from specray.bench.soak.recovery import changes_of
from specray.bench.testbed.beds import Bed
from specray.bench.testbed.parts import Part, PartRole
from specray.bench.testbed.tree import descendants, reap_orphans
from specray.errors import SpecrayError

IDLE_TIMEOUT_S = 60.0
READY_PERIOD_S = 0.5
DRAFTS = "specray_spec_decode_num_drafts_by_source_total"
BLOCKS = {"target": "specray_target_blocks_in_use", "draft": "specray_draft_blocks_in_use"}


@dataclass(frozen=True, slots=True)
class Whole:
    parts_s: float
    """Time in seconds at which all its processes were back and had loaded their models."""
    speculation_s: float
    """Time in seconds at which, after that, draft tokens were seen to be verified."""


class Watch:
    """Readings of a whole soak.

    Args:
        now_s: the soak's clock in seconds.
    """

    def __init__(
        self, bed: Bed, http: ServerClient, memory: MemoryRecord, *, now_s: Callable[[], float]
    ) -> None:
        self._bed = bed
        self._http = http
        self._memory = memory
        self._now_s = now_s
        self._drafts: dict[str, list[tuple[float, float]]] = {}
        self._roles: dict[int, str] = {}

    @property
    def draft_changes_s(self) -> list[list[float]]:
        """Times at which drafts were verified, of each application that has Routers."""
        return [changes_of(readings) for readings in self._drafts.values()]

    async def metrics_for_ever(self) -> None:
        while True:
            await self._read_drafts()
            await asyncio.sleep(0.5)

    async def memory_for_ever(self) -> None:
        while True:
            await asyncio.to_thread(self._read_memory)
            await asyncio.sleep(5.0)

    async def parts(self) -> tuple[Part, ...]:
        parts = await self._bed.control.parts()
        self._roles |= {part.pid: part.role.value for part in parts}
        return parts

    async def wait_whole(
        self, *, killed: frozenset[int], timeout_s: float, ranks: int, drafts: int, num_models: int = 1
    ) -> Whole | None:
        """Waits until every part is back, and then for rounds of each model's draft; None: too long.

        Args:
            killed: ids of processes that are no parts any more, whatever the service says.
            timeout_s: longest wait in seconds.
            ranks: tensor-parallel ranks of a target.
            drafts: number of a model's draft replicas.
        """
        end_s = self._now_s() + timeout_s
        parts_s: float | None = None
        while self._now_s() < end_s:
            if parts_s is None and await self._has_all(killed, ranks, drafts, num_models):
                parts_s = self._now_s()
            last_s = [max(changes, default=0.0) for changes in self.draft_changes_s]
            if parts_s is not None and last_s and min(last_s) > parts_s:
                return Whole(parts_s, self._now_s())
            await asyncio.sleep(READY_PERIOD_S)
        return None

    async def blocks_when_idle(self, timeout_s: float) -> dict[str, float | None]:
        """Returns the blocks that a service still holds, by engine, when idle or after ``timeout_s``."""
        blocks: dict[str, float | None] = dict.fromkeys(BLOCKS)
        end_s = self._now_s() + timeout_s
        while self._now_s() < end_s:
            samples = await self._samples()
            if samples is not None:
                blocks = {role: total(samples, name) for role, name in BLOCKS.items()}
                busy = ("specray_running_sessions", "specray_queue_depth")
                if not any(total(samples, name) for name in busy) and not any(blocks.values()):
                    break
            await asyncio.sleep(READY_PERIOD_S)
        return blocks

    async def _has_all(self, killed: frozenset[int], ranks: int, drafts: int, num_models: int) -> bool:
        try:
            roles = [part.role for part in await self.parts() if part.pid not in killed]
            running = await self._bed.control.running()
        except SpecrayError:
            return False
        if running.get("Draft", 0) < num_models * drafts or running.get("Router", 0) < num_models:
            return False
        wanted = {
            PartRole.CONTROLLER: 1,
            PartRole.INGRESS: 1,
            PartRole.MODELS: int(num_models > 1),
            PartRole.ROUTER: num_models,
            PartRole.TARGET: num_models * ranks,
            PartRole.DRAFT: num_models * drafts,
        }
        return all(roles.count(role) >= number for role, number in wanted.items())

    async def _read_drafts(self) -> None:
        samples = await self._samples()
        totals = defaultdict[str, float](float)
        for (name, labels), value in (samples or {}).items():
            if name == DRAFTS and (found := dict(labels)).get("source") == "model":
                totals[found.get("application", "")] += value
        for application, value in totals.items():
            self._drafts.setdefault(application, []).append((self._now_s(), value))

    async def _samples(self) -> Samples | None:
        try:
            # Each of several models is an application.
            return parse_samples(await self._http.metrics_text(), summed=("deployment", "replica"))
        except SpecrayError:
            return None

    def _read_memory(self) -> None:
        reap_orphans()
        for pid in descendants(os.getpid()):
            num_bytes = anonymous_bytes(pid)
            if num_bytes:
                name = process_name(pid, self._roles)
                self._memory.add(pid, name, Sample(self._now_s(), num_bytes))
