"""Host of a synchronous engine: makes all its calls, on the event loop that serves it.

The engine and its server share one thread. A separate engine thread would cost each round four hand-offs, 0.3
ms with cold caches after a forward, and gain nothing: while the engine works, all requests wait for it
anyway. gRPC reads, writes and answers pings on its own threads meanwhile; what it has read is handled between
engine calls.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

from specray.engine_info import EngineInfo
from specray.errors import EngineLostError, InvalidRequestError, SpecrayError
from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import Aside, BoundEngine, EngineService, ItemT, RepliesT
from specray.rpc.workers.batch_runner import BatchRunner, ReplySink, StreamReplies
from specray.rpc.workers.busy import BusyMeter
from specray.rpc.workers.item_queue import ItemQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is neither items nor a check."""

    work: Callable[[], bytes | Aside]
    done: asyncio.Future[bytes | Aside]


@dataclass(frozen=True, slots=True)
class _Check:
    done: asyncio.Future[None]
    due_turn: int
    """Number of engine calls after which the check runs; earlier if nothing waits."""


class EngineHost(Generic[ItemT, RepliesT]):
    """Runs the requests of all streams in turn; made and used on one event loop.

    Between two engine calls the event loop runs once: replies are sent, and new requests join the next call.
    A draft's call is bounded by the engine's ``max_num_batched_tokens``, so that a router with few items does
    not wait for all items of another. When the engine breaks, ``on_broken`` is called once; from then on
    requests are dropped and ``check`` raises.
    """

    def __init__(
        self,
        role: EngineService[ItemT, RepliesT],
        make_engine: Callable[[], BoundEngine[ItemT, RepliesT]],
        *,
        on_broken: Callable[[EngineLostError], None],
    ) -> None:
        self._role = role
        self._make_engine = make_engine
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._queue: ItemQueue[ItemT, RepliesT] = ItemQueue(role.num_tokens)
        self._ended: list[ReplySink[RepliesT]] = []
        self._checks: deque[_Check] = deque()
        self._calls: deque[_Call] = deque()
        self._one_call = asyncio.Lock()
        """What a call does aside is over before the next one begins."""
        self._num_turns = 0
        self._budget = 0
        self._busy = BusyMeter()
        self._is_scheduled = False
        self._engine: BoundEngine[ItemT, RepliesT] | None = None
        self._runner: BatchRunner[ItemT, RepliesT] | None = None
        self._broken: EngineLostError | None = None

    def start(self) -> EngineInfo:
        """Builds the engine, which blocks the loop. Raises whatever the factory raises."""
        self._engine = self._make_engine()
        self._runner = BatchRunner(self._role, self._engine, _deliver_all)
        self._budget = self._engine.read_info().max_num_batched_tokens
        # Loaded objects live on: collecting them again and again would pause rounds for tens of milliseconds.
        gc.collect()
        gc.freeze()
        return self._engine.read_info()

    def info(self) -> EngineInfo:
        """Current info of the engine; after ``start``."""
        assert self._engine is not None, "info comes after start"
        return replace(self._engine.read_info(), busy_share=round(self._busy.share, 4))

    @property
    def busy(self) -> BusyMeter:
        return self._busy

    def submit(self, stream: ReplySink[RepliesT], batch: RequestBatch[ItemT]) -> None:
        if self._engine is not None:
            self._queue.put(stream, batch)
            self._schedule()

    def end_stream(self, stream: ReplySink[RepliesT]) -> None:
        """Drops the stream's waiting requests and releases all its sequences."""
        self._queue.drop(stream)
        if self._engine is not None:
            self._ended.append(stream)
            self._schedule()

    async def check(self) -> None:
        """Runs a real engine step after the waiting requests. Raises EngineLostError when it fails."""
        if self._broken is not None or self._engine is None:
            raise self._broken or EngineLostError(f"the {self._role.name} engine does not run")
        done: asyncio.Future[None] = self._loop.create_future()
        self._checks.append(_Check(done, self._num_turns + len(self._queue)))
        self._schedule()
        await done

    async def call(self, method: str, data: bytes) -> bytes:
        """Runs one of the role's ``calls`` between engine calls, one after the other; returns its answer.

        Raises:
            InvalidRequestError: the engine knows no adapters; or what the method raises for its message.
            EngineLostError: the engine is broken or does not run.
        """
        if self._engine is None:
            raise self._broken or EngineLostError(f"the {self._role.name} engine does not run")
        if (adapters := self._engine.adapters) is None or self.info().max_adapters == 0:
            raise InvalidRequestError(f"this {self._role.name} knows no adapters; set target.adapters")
        async with self._one_call:
            answer = await self._in_turn(partial(self._role.calls[method], adapters, data))
            if isinstance(answer, Aside):
                await asyncio.to_thread(answer.work)
                answer = await self._in_turn(answer.end)
        assert isinstance(answer, bytes), "a call has one part aside"
        return answer

    async def _in_turn(self, work: Callable[[], bytes | Aside]) -> bytes | Aside:
        if self._broken is not None or self._engine is None:
            raise self._broken or EngineLostError(f"the {self._role.name} engine does not run")
        done: asyncio.Future[bytes | Aside] = self._loop.create_future()
        self._calls.append(_Call(work, done))
        self._schedule()
        return await done

    def stop(self) -> None:
        """Closes the engine and drops waiting requests; idempotent."""
        engine, self._engine, self._runner = self._engine, None, None
        for check in self._checks:
            if not check.done.done():
                check.done.set_exception(EngineLostError(f"the {self._role.name} engine was stopped"))
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(EngineLostError(f"the {self._role.name} engine was stopped"))
        self._checks.clear()
        self._calls.clear()
        self._queue.clear()
        if engine is not None:
            self._guard(engine.close)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Makes one engine call for waiting requests; schedules the next on the loop."""
        self._is_scheduled = False
        if self._runner is None:
            return
        self._busy.begin()
        if self._broken is None:
            self._guard(self._take_turn, self._runner)
        else:
            self._queue.clear()
        if self._calls:
            self._answer(self._calls.popleft())
        self._num_turns += 1
        while self._checks and (not self._queue or self._checks[0].due_turn <= self._num_turns):
            self._check(self._checks.popleft().done)
        self._busy.end()
        # In both cases the stream writers were woken before, so their replies are sent first.
        if self._queue or self._checks or self._calls:
            self._schedule()
        else:
            self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Lets the engine do what is expected next, while nothing is asked of it."""
        if self._engine is None or self._broken is not None or self._is_scheduled:
            return
        self._busy.begin()
        try:
            self._engine.advance()
        except Exception:
            # Nobody waits for it: it is asked for anew, unless the engine itself is broken.
            logger.exception("a step ahead of the %s engine failed", self._role.name)
            self._guard(self._engine.check)
        self._busy.end()

    def _take_turn(self, runner: BatchRunner[ItemT, RepliesT]) -> None:
        ended, self._ended = self._ended, []
        for stream in ended:
            runner.end_stream(stream)
        if self._queue:
            portions = (
                self._queue.take(self._budget) if self._role.merges_requests else [self._queue.take_request()]
            )
            for portion in portions:
                runner.add(portion.stream, portion.batch, is_last=portion.is_last)
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

    def _answer(self, call: _Call) -> None:
        if call.done.done():
            return
        try:
            if self._broken is not None:
                raise self._broken
            call.done.set_result(call.work())
        except SpecrayError as error:
            call.done.set_exception(error)
        except Exception as error:
            # The engine's ranks may differ now.
            self._break(error)
            assert self._broken is not None
            call.done.set_exception(self._broken)

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            logger.error("the %s engine is broken", self._role.name, exc_info=error)
            reason = str(error) if isinstance(error, SpecrayError) else type(error).__name__
            self._broken = EngineLostError(f"the {self._role.name} engine is broken: {reason}")
            self._on_broken(self._broken)


def _deliver_all(answers: list[StreamReplies[Any]]) -> None:
    for answer in answers:
        answer.stream.deliver(answer.replies, answer.num_requests)
