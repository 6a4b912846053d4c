"""The one owner of a synchronous engine: makes every call of it, on the event loop that serves it.

The engine and its server share one thread. A thread of its own for the engine would cost each round four
hand-offs, 0.3 ms when the caches are cold after a forward, and buy nothing: while the engine works there is
nothing else to do for whoever waits for it. gRPC itself reads, writes and answers pings on its own threads
meanwhile; what it has read is seen between two engine calls.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

from specray.errors import EngineLostError, SpecrayError
from specray.rpc.codec.engine import RequestBatch
from specray.rpc.role import BoundEngine, ItemT, RepliesT, ReplyT, Role
from specray.rpc.workers.batch_runner import BatchRunner, Delivery, Outlet
from specray.rpc.workers.busy import BusyMeter
from specray.rpc.workers.item_queue import FairQueue
from specray.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Check:
    done: asyncio.Future[None]
    due_turn: int
    """Behind so many engine calls, or as soon as nothing waits."""


class EngineHost(Generic[ItemT, ReplyT, RepliesT]):
    """Runs the requests of all streams, which take turns; made and used on one event loop.

    Between two engine calls the loop takes a turn: replies leave, and what has arrived meanwhile joins the
    next call. A draft's call is bounded by the engine's ``max_num_batched_tokens``, so that a router which
    asks for little need not wait for all that another has asked. When the engine breaks, ``on_broken`` is
    called once; from then on requests are dropped and ``check`` raises.
    """

    def __init__(
        self,
        role: Role[ItemT, ReplyT, RepliesT],
        make_engine: Callable[[], BoundEngine[ItemT, RepliesT]],
        *,
        on_broken: Callable[[EngineLostError], None],
    ) -> None:
        self._role = role
        self._make_engine = make_engine
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[ItemT, RepliesT] = FairQueue(role.num_tokens)
        self._ended: list[Outlet[RepliesT]] = []
        self._checks: deque[_Check] = deque()
        self._num_turns = 0
        self._budget = 0
        self._busy = BusyMeter()
        self._is_scheduled = False
        self._engine: BoundEngine[ItemT, RepliesT] | None = None
        self._runner: BatchRunner[ItemT, ReplyT, RepliesT] | None = None
        self._broken: EngineLostError | None = None

    def start(self) -> EngineInfo:
        """Builds the engine; the loop stands still meanwhile. Raises whatever the factory raises."""
        self._engine = self._make_engine()
        self._runner = BatchRunner(self._role, self._engine, _deliver_all)
        self._budget = self._engine.read_info().max_num_batched_tokens
        # What was loaded stays: walking it again and again would stop rounds for tens of milliseconds.
        gc.collect()
        gc.freeze()
        return self._engine.read_info()

    def info(self) -> EngineInfo:
        """What the engine says of itself now; after ``start``."""
        assert self._engine is not None, "info comes after start"
        return replace(self._engine.read_info(), busy_share=round(self._busy.share, 4))

    @property
    def busy(self) -> BusyMeter:
        """Of the engine's calls."""
        return self._busy

    def submit(self, outlet: Outlet[RepliesT], batch: RequestBatch[ItemT]) -> None:
        """Takes one request of a stream."""
        if self._engine is not None:
            self._queue.put(outlet, batch)
            self._schedule()

    def end_stream(self, outlet: Outlet[RepliesT]) -> None:
        """Forgets what the stream still waits for and releases everything that it owns."""
        self._queue.drop(outlet)
        if self._engine is not None:
            self._ended.append(outlet)
            self._schedule()

    async def check(self) -> None:
        """Runs the engine's real step, behind what waits. Raises EngineLostError when it fails."""
        if self._broken is not None or self._engine is None:
            raise self._broken or EngineLostError(f"the {self._role.name} engine does not run")
        done: asyncio.Future[None] = self._loop.create_future()
        self._checks.append(_Check(done, self._num_turns + len(self._queue)))
        self._schedule()
        await done

    def stop(self) -> None:
        """Closes the engine; what still waits is dropped. Idempotent."""
        engine, self._engine, self._runner = self._engine, None, None
        for check in self._checks:
            if not check.done.done():
                check.done.set_exception(EngineLostError(f"the {self._role.name} engine was stopped"))
        self._checks.clear()
        self._queue.clear()
        if engine is not None:
            self._guard(engine.close)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        """One engine call for what waits; the next one is a turn of the loop away."""
        self._is_scheduled = False
        if self._runner is None:
            return
        self._busy.begin()
        if self._broken is None:
            self._guard(self._take_turn, self._runner)
        else:
            self._queue.clear()
        self._num_turns += 1
        while self._checks and (not self._queue or self._checks[0].due_turn <= self._num_turns):
            self._check(self._checks.popleft().done)
        self._busy.end()
        if self._queue or self._checks:
            # The writers were woken before: their replies leave first.
            self._schedule()

    def _take_turn(self, runner: BatchRunner[ItemT, ReplyT, RepliesT]) -> None:
        ended, self._ended = self._ended, []
        for outlet in ended:
            runner.end_stream(outlet)
        if self._queue:
            portions = (
                self._queue.take(self._budget) if self._role.merges_requests else [self._queue.take_request()]
            )
            for portion in portions:
                runner.add(portion.outlet, portion.batch, is_last=portion.is_last)
        runner.flush()

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._break(error)

    def _check(self, done: asyncio.Future[None]) -> None:
        assert self._engine is not None
        if self._broken is None:
            self._guard(self._engine.check)
        if done.done():
            return
        if self._broken is not None:
            done.set_exception(self._broken)
        else:
            done.set_result(None)

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            logger.error("the %s engine is broken", self._role.name, exc_info=error)
            reason = str(error) if isinstance(error, SpecrayError) else type(error).__name__
            self._broken = EngineLostError(f"the {self._role.name} engine is broken: {reason}")
            self._on_broken(self._broken)


def _deliver_all(deliveries: list[Delivery[Any]]) -> None:
    for delivery in deliveries:
        delivery.outlet.deliver(delivery.replies, delivery.num_requests)
