"""The one thread that owns a synchronous engine: builds it, makes every call of it, never dies silently."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from specray.errors import EngineLostError, SpecrayError
from specray.rpc.batch_runner import BatchRunner, Delivery, Outlet
from specray.rpc.codec import RequestBatch
from specray.rpc.role import BoundEngine, ItemT, RepliesT, ReplyT, Role
from specray.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Request(Generic[ItemT, RepliesT]):
    outlet: Outlet[RepliesT]
    batch: RequestBatch[ItemT]


@dataclass(frozen=True, slots=True)
class _StreamEnd(Generic[RepliesT]):
    outlet: Outlet[RepliesT]


@dataclass(frozen=True, slots=True)
class _Check:
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    """The last command."""


class EngineThread(Generic[ItemT, ReplyT, RepliesT]):
    """Runs the requests of all streams in order of arrival; made and used on one event loop.

    When the engine breaks, ``on_broken`` is called once on that loop; from then on requests are dropped and
    ``check`` raises.
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
        self._commands: queue.SimpleQueue[
            _Request[ItemT, RepliesT] | _StreamEnd[RepliesT] | _Check | _Stop
        ] = queue.SimpleQueue()
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._read_info: Callable[[], EngineInfo] | None = None
        self._broken: EngineLostError | None = None
        self._thread = threading.Thread(target=self._main, name=f"specray-{role.name}-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and the engine is not broken."""
        return self._thread.is_alive() and self._broken is None

    async def start(self, timeout_s: float) -> EngineInfo:
        """Builds the engine on its thread.

        Raises:
            EngineLostError: it is not there after ``timeout_s`` seconds.
            Exception: whatever the factory raises.
        """
        self._thread.start()
        try:
            return await asyncio.wait_for(self._started, timeout_s)
        except TimeoutError:
            raise EngineLostError(f"the {self._role.name} was not loaded within {timeout_s} s") from None

    def info(self) -> EngineInfo:
        """What the engine says of itself now; after ``start``."""
        assert self._read_info is not None, "info comes after start"
        return self._read_info()

    def submit(self, outlet: Outlet[RepliesT], batch: RequestBatch[ItemT]) -> None:
        self._commands.put(_Request(outlet, batch))

    def end_stream(self, outlet: Outlet[RepliesT]) -> None:
        """Releases everything that the stream owns, behind what it had asked for."""
        self._commands.put(_StreamEnd(outlet))

    async def check(self, timeout_s: float) -> None:
        """Runs the engine's real step, behind what is queued.

        Raises:
            EngineLostError: the step failed, or did not end within ``timeout_s`` seconds.
        """
        if not self.is_alive:
            raise self._broken or EngineLostError(f"the {self._role.name} engine does not run")
        done: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(_Check(done))
        try:
            await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            reason = f"the {self._role.name} engine did not end a step within {timeout_s} s"
            raise EngineLostError(reason) from None

    async def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the call in progress; False when that takes longer than ``timeout_s``."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    # What follows runs on the engine thread.

    def _main(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._on_loop(_set_exception, self._started, error)
            return
        self._read_info = engine.read_info
        self._on_loop(_set_result, self._started, engine.read_info())
        runner = BatchRunner(self._role, engine, self._deliver)
        try:
            while self._run_waiting(engine, runner):
                pass
        except BaseException as error:
            logger.exception("the %s engine thread ends", self._role.name)
            self._break(error)
        finally:
            self._guard(engine.close)

    def _run_waiting(
        self, engine: BoundEngine[ItemT, RepliesT], runner: BatchRunner[ItemT, ReplyT, RepliesT]
    ) -> bool:
        """Waits for a command, then runs it and all others that wait. False: the last one was run."""
        commands = [self._commands.get()]
        while not self._commands.empty():
            commands.append(self._commands.get_nowait())
        is_last = False
        for command in commands:
            match command:
                case _Check():
                    self._check(engine, command.done)
                case _Stop():
                    is_last = True
                case _Request() if self._broken is None:
                    self._guard(runner.add, command.outlet, command.batch)
                case _StreamEnd() if self._broken is None:
                    self._guard(runner.end_stream, command.outlet)
        if self._broken is None:
            self._guard(runner.flush)
        return not is_last

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._break(error)

    def _check(self, engine: BoundEngine[ItemT, RepliesT], done: asyncio.Future[None]) -> None:
        if self._broken is None:
            self._guard(engine.check)
        if self._broken is not None:
            self._on_loop(_set_exception, done, self._broken)
        else:
            self._on_loop(_set_result, done, None)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            logger.error("the %s engine is broken", self._role.name, exc_info=error)
            reason = str(error) if isinstance(error, SpecrayError) else type(error).__name__
            self._broken = EngineLostError(f"the {self._role.name} engine is broken: {reason}")
            self._on_loop(self._on_broken, self._broken)

    def _deliver(self, deliveries: list[Delivery[RepliesT]]) -> None:
        self._on_loop(_deliver_all, deliveries)

    def _on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: whoever waited has gone.
            logger.debug("the loop of the %s engine thread is closed", self._role.name)


def _deliver_all(deliveries: list[Delivery[Any]]) -> None:
    for delivery in deliveries:
        delivery.outlet.deliver(delivery.replies, delivery.num_requests)


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else EngineLostError(repr(error)))
