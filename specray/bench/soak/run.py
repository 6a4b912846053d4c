"""Runs one soak, from its reference outputs to its result."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specray.bench.load.client import ServerClient
from specray.bench.soak.adapters import UNDER_LOAD, with_adapters
from specray.bench.soak.cases import Case, ClientOutput, make_cases
from specray.bench.soak.clients import CaseSender, draw
from specray.bench.soak.faults import inject, prepare
from specray.bench.soak.ledger import Attempt, Entry, Judgement, Ledger, judge
from specray.bench.soak.memory import Growth, MemoryRecord
from specray.bench.soak.models import with_models
from specray.bench.soak.plan import SoakPlan
from specray.bench.soak.recovery import back_after_s, longest_wait_s
from specray.bench.soak.schedule import FaultKind, PlannedFault, plan_faults
from specray.bench.soak.watch import IDLE_TIMEOUT_S, Watch, Whole
from specray.bench.testbed.beds import Bed, open_bed
from specray.config import Config
from specray.errors import SpecrayError
from specray.rpc.inference.client import SpecrayClient

_EXCUSING = frozenset({FaultKind.ROUTER_KILL, FaultKind.INGRESS_HANG})
"""Faults that end requests: their callers may have to send them again."""


@dataclass(slots=True)
class Fault:
    """A fault that was injected, and the recovery from it."""

    kind: FaultKind
    at_s: float
    hold_s: float
    detail: str = ""
    parts_after_s: float | None = None
    """Seconds until all processes were back and had loaded their models."""
    whole_after_s: float | None = None
    """Seconds until, after that, draft tokens were verified; None: not in time."""
    wait_s: float | None = None
    """Longest wait of a running stream for its next text, in seconds."""
    speculation_after_s: float | None = None
    is_over: bool = False
    """True once the service was waited for."""
    is_done: bool = True
    """False: it could not be injected, or not be ended; ``detail`` says why."""


@dataclass(slots=True)
class SoakResult:
    plan: SoakPlan
    duration_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[Fault] = field(default_factory=list)
    num_not_injected: int = 0
    blocks: dict[str, float | None] = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()
    warm_s: float | None = None
    """Time when every kind of fault had been over once, in seconds; memory is not compared before. None: any
    time."""
    num_processes: int = 0
    unjudged: tuple[str, ...] = ()
    """Names of processes none of which lived long enough to be judged."""
    num_tokens: int = 0
    is_interrupted: bool = False
    """True if Ctrl-C ended the load; the rest is what was seen until then."""


Progress = Callable[[str], None]


async def soak(plan: SoakPlan, config: Config, progress: Progress = lambda text: None) -> SoakResult:
    """Starts the service, gets the reference outputs, runs the load under faults, and ends everything.

    If it is cancelled during the load, it returns what was seen so far.

    Raises:
        ConfigError: the machine cannot do it, or the configuration is wrong.
        EngineLostError: the service did not start, or did not give the reference.
    """
    with tempfile.TemporaryDirectory(prefix="specray-soak-") as directory:
        if FaultKind.ADAPTER_CHURN in plan.kinds:
            config = with_adapters(config, Path(directory))
        if plan.num_models > 1:
            config = with_models(config, Path(directory), plan.num_models)
        return await _soak(plan, config, progress)


async def _soak(plan: SoakPlan, config: Config, progress: Progress) -> SoakResult:
    progress("starting the service")
    async with (
        open_bed(plan.testbed, config, seed=plan.seed, directory=plan.logs) as bed,
        ServerClient(bed.url, timeout_s=plan.request_timeout) as http,
        SpecrayClient(bed.grpc_address) as grpc,
    ):
        return await Soak(plan, bed, http, grpc, progress).run()


class Soak:
    def __init__(
        self, plan: SoakPlan, bed: Bed, http: ServerClient, grpc: SpecrayClient, progress: Progress
    ) -> None:
        self._plan = plan
        self._bed = bed
        self._progress = progress
        self._zero_s = time.monotonic()
        self.result = SoakResult(plan)
        self._memory = MemoryRecord(warmup_s=plan.warmup, min_span_s=60.0)
        self._watch = Watch(bed, http, self._memory, now_s=self._now_s)
        self._caller = CaseSender(
            http, grpc, model=bed.config.model_name, timeout_s=plan.request_timeout, now_s=self._now_s
        )
        self._models = tuple(each.name for each in bed.config.models) or ("",)
        self._streams: list[list[float]] = []
        self._num_sent = 0
        self._has_hurt = False

    @property
    def _is_on(self) -> bool:
        return self._now_s() < self._plan.duration or not self._has_hurt

    @property
    def _is_away(self) -> bool:
        """True while the only Ingress is hung or being replaced."""
        last = self.result.faults[-1:]
        return any(fault.kind is FaultKind.INGRESS_HANG and not fault.is_over for fault in last)

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    async def run(self) -> SoakResult:
        plan, result = self._plan, self.result
        adapters = UNDER_LOAD if FaultKind.ADAPTER_CHURN in plan.kinds else ()
        cases = make_cases(plan.num_cases, seed=plan.seed, adapters=adapters, models=self._models)
        await prepare(self._bed, plan.kinds)
        self._progress(f"{len(cases)} reference outputs, without speculation")
        references = [await self._caller.reference(case) for case in cases]
        self._zero_s = time.monotonic()
        watchers = [
            asyncio.create_task(self._watch.metrics_for_ever()),
            asyncio.create_task(self._watch.memory_for_ever()),
        ]
        try:
            await self.load(cases, references)
            result.duration_s = self._now_s()
            self._progress("waiting until the service is idle")
            # Seconds to wait for an idle service after Ctrl-C.
            idle_s = 15.0 if result.is_interrupted else IDLE_TIMEOUT_S
            result.blocks = await self._watch.blocks_when_idle(idle_s)
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        self._measure_recovery()
        result.growths = self._memory.growths()
        result.num_processes = self._memory.num_processes
        result.unjudged = self._memory.unjudged()
        return result

    async def load(self, cases: Sequence[Case], references: Sequence[ClientOutput]) -> None:
        try:
            await self._watch.parts()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._faults())
                for index in range(self._plan.num_clients):
                    group.create_task(self._client(index, cases, references))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "it runs in a task"
            task.uncancel()
            self.result.is_interrupted = True
            self._progress("interrupted; a second time ends it without a report")

    async def _client(self, index: int, cases: Sequence[Case], references: Sequence[ClientOutput]) -> None:
        plan = self._plan
        rng = random.Random(f"{plan.seed} client {index}")
        # Each model has a client that always streams from it.
        is_steady = index < len(self._models)
        own = [case for case in cases if not is_steady or case.model == self._models[index]]
        while self._is_on and self._num_sent < plan.max_requests:
            self._num_sent += 1
            drawn = draw(own, rng, cancel_share=plan.cancel_share, is_steady=is_steady)
            times: list[float] = []
            self._streams.append(times)
            attempts = await self._caller.request(
                drawn.case,
                drawn.way,
                times,
                cancel_after_s=drawn.cancel_after_s,
                is_away=lambda: self._is_away,
            )
            entry = self._judge(drawn.case, attempts, references[drawn.case.index])
            self.result.ledger.add(
                Entry(
                    drawn.case.index,
                    drawn.way,
                    entry[0],
                    entry[1],
                    attempts[0].started_s,
                    attempts[-1].ended_s,
                )
            )
            self.result.num_tokens += attempts[-1].output.num_tokens or 0
            if entry[0] in (Judgement.FAILED, Judgement.WRONG):
                self._progress(f"{entry[0]}: {drawn.way} case {drawn.case.index}: {entry[1]}")
                await asyncio.sleep(0.5)

    def _judge(
        self, case: Case, attempts: Sequence[Attempt], reference: ClientOutput
    ) -> tuple[Judgement, str]:
        deaths_s = [fault.at_s for fault in self.result.faults if fault.kind in _EXCUSING]
        window_s = self._plan.recovery_timeout
        return judge(attempts, reference, deaths_s=deaths_s, window_s=window_s)

    async def _faults(self) -> None:
        try:
            await self.inject_faults()
        finally:
            self._has_hurt = True

    async def inject_faults(self) -> None:
        plan = self._plan
        # Seconds without new faults before the planned end.
        last_s = max(plan.calm, plan.duration - 15.0)
        planned = plan_faults(
            plan.kinds, num_faults=plan.num_faults, first_s=plan.calm, last_s=last_s, seed=plan.seed
        )
        rng = random.Random(f"{plan.seed} faults")
        for number, fault in enumerate(planned):
            if number and number == plan.rehearsal:
                self.result.warm_s = self._now_s()
                self._memory.warm_from(self.result.warm_s)
            await asyncio.sleep(max(0.0, fault.at_s - self._now_s()))
            # Factor by which recoveries that take longer than planned may stretch the load.
            if self._now_s() > 2.0 * plan.duration:
                self.result.num_not_injected = len(planned) - number
                return
            await self.inject_fault(fault, rng)

    async def inject_fault(self, planned: PlannedFault, rng: random.Random) -> None:
        fault = Fault(planned.kind, self._now_s(), planned.hold_s)
        self.result.faults.append(fault)
        killed: frozenset[int] = frozenset()
        try:
            done = await inject(self._bed, planned, rng)
            fault.detail, killed = done.what, done.killed
        except SpecrayError as error:
            fault.detail, fault.is_done = f"not done: {error}", False
        whole = await self.wait_whole(killed)
        after = "not within its time"
        if whole is not None:
            fault.parts_after_s = whole.parts_s - fault.at_s
            fault.whole_after_s = whole.speculation_s - fault.at_s
            after = f"after {fault.whole_after_s:.1f} s"
        fault.is_over = True
        self._progress(f"{self._now_s():.0f} s: {fault.kind} ({fault.detail}); whole again {after}")
        if whole is None or not fault.is_done:
            await self._restore()

    async def _restore(self) -> None:
        try:
            await self._bed.restore()
            whole = await self.wait_whole(frozenset())
        except SpecrayError as error:
            self._progress(f"{self._now_s():.0f} s: not restored: {error}")
        else:
            self._progress(f"{self._now_s():.0f} s: {'restored' if whole else 'not restored in time'}")

    async def wait_whole(self, killed: frozenset[int]) -> Whole | None:
        config = self._bed.config
        pair = config.models[0] if config.models else config
        return await self._watch.wait_whole(
            killed=killed,
            timeout_s=self._plan.recovery_timeout,
            ranks=pair.target.tensor_parallel_size,
            drafts=pair.draft.num_replicas,
            num_models=len(self._models),
        )

    def _measure_recovery(self) -> None:
        faults = self.result.faults
        changes_s = self._watch.draft_changes_s
        for index, fault in enumerate(faults):
            until_s = faults[index + 1].at_s if index + 1 < len(faults) else self.result.duration_s
            fault.wait_s = longest_wait_s(self._streams, fault.at_s, until_s)
            back_s = [back_after_s(changes, fault.at_s, until_s) for changes in changes_s]
            known_s = [each for each in back_s if each is not None]
            fault.speculation_after_s = max(known_s, default=None) if len(known_s) == len(back_s) else None
