"""Fake connections to engines in this process, over a transport that misbehaves by a seeded schedule."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from specray.engine_info import EngineInfo
from specray.errors import ConfigError, EngineLostError, InvalidRequestError
from specray.interfaces import Clock, Drafter, SyncAdapterEngine, SyncDraftEngine, SyncTargetEngine
from specray.types import ADAPTER, DraftReplies, SpeculateItem, TargetReplies, VerifyItem

RepliesT = TypeVar("RepliesT", DraftReplies, TargetReplies)


@dataclass(slots=True)
class FakeTransport:
    """Delays, loses and duplicates replies, each independently, so that they may be reordered.

    Args:
        rng: seeded random source of the schedule.
        max_delay_s: delays are uniform in [0, max_delay_s].
        loss: probability that a reply never arrives.
        duplication: probability that a reply arrives twice.
    """

    rng: random.Random
    max_delay_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0

    def delays(self) -> list[float]:
        """Delays in seconds of one reply's copies; empty: lost."""
        if self.rng.random() < self.loss:
            return []
        copies = 2 if self.rng.random() < self.duplication else 1
        return [self.rng.uniform(0.0, self.max_delay_s) for _ in range(copies)]


class ReplyQueue(Generic[RepliesT]):
    """Replies that have arrived over a connection, and whether it still stands."""

    def __init__(self) -> None:
        self._arrived: deque[RepliesT] = deque()
        self._wake = asyncio.Event()
        self.is_lost = False

    def check(self) -> None:
        """Raises EngineLostError if the connection is lost."""
        if self.is_lost:
            raise EngineLostError("the fake connection is gone")

    def put(self, replies: RepliesT) -> None:
        self._arrived.append(replies)
        self._wake.set()

    async def get(self) -> RepliesT:
        """Waits for the next replies. Raises EngineLostError if the connection is lost."""
        while not self._arrived:
            self.check()
            self._wake.clear()
            await self._wake.wait()
        self.check()
        return self._arrived.popleft()

    def lose(self) -> None:
        self.is_lost = True
        self._wake.set()


class _Wire(ReplyQueue[RepliesT]):
    """Replies in flight, and the state of the connection."""

    def __init__(self, clock: Clock, transport: FakeTransport | None) -> None:
        super().__init__()
        self._clock = clock
        self._transport = transport
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: asyncio.Queue[RepliesT] = asyncio.Queue()
        self.is_hanging = False

    def answer(self, replies: RepliesT) -> None:
        """Sends a step's replies; a step of zero cost over a perfect transport is answered at once."""
        if self.is_hanging:
            return
        if replies.forward_ns == 0 and self._transport is None:
            self.put(replies)
            return
        self._steps.put_nowait(replies)
        if not self._tasks:
            self._spawn_worker()

    def lose(self) -> None:
        super().lose()
        for task in self._tasks:
            task.cancel()

    def _spawn_worker(self) -> None:
        self._track(asyncio.create_task(self._work()))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        """Runs one step after the other, like the thread of a real worker."""
        while True:
            replies = await self._steps.get()
            await self._clock.sleep(replies.forward_ns / 1e9)
            if self._transport is None:
                self.put(replies)
                continue
            for reply in replies.replies:
                single = replace(replies, replies=(reply,))
                for delay_s in self._transport.delays():
                    self._track(asyncio.create_task(self._travel(single, delay_s)))

    async def _travel(self, replies: RepliesT, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self.put(replies)


class _Local(Generic[RepliesT]):
    """What both connections have in common.

    Args:
        engine: answers each batch; its exceptions lose the connection.
        clock: clock on which a step's ``forward_ns`` pass.
        transport: delays of replies; None delivers at once, in order, exactly once.
    """

    def __init__(
        self, engine: SyncDraftEngine | SyncTargetEngine, clock: Clock, transport: FakeTransport | None
    ) -> None:
        self._engine = engine
        self._wire: _Wire[RepliesT] = _Wire(clock, transport)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def fetch_info(self) -> EngineInfo:
        self._wire.check()
        return self._engine.info

    async def release(self, request_ids: Sequence[str]) -> None:
        self._wire.check()
        if request_ids:
            self._engine.release(request_ids)

    async def replies(self) -> RepliesT:
        return await self._wire.get()

    async def close(self) -> None:
        self._wire.lose()

    def lose(self) -> None:
        self._wire.lose()

    def hang(self) -> None:
        self._wire.is_hanging = True


class LocalVerifier(_Local[TargetReplies]):
    """interfaces.Verifier over a SyncTargetEngine in this process; for the arguments see ``_Local``."""

    def __init__(
        self, engine: SyncTargetEngine, clock: Clock, *, transport: FakeTransport | None = None
    ) -> None:
        super().__init__(engine, clock, transport)
        self._target = engine

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        await self.release(released)
        self._wire.answer(self._target.verify(items))

    async def load_adapter(self, folder: str, digest: bytes = b"") -> bytes:
        self._wire.check()
        assert isinstance(self._target, SyncAdapterEngine)
        try:
            loading = self._target.start_loading(folder, digest)
            loading.read()
            return loading.place()
        except ConfigError as error:
            raise InvalidRequestError(str(error), field=ADAPTER) from None

    async def unload_adapter(self, digest: bytes) -> None:
        self._wire.check()
        assert isinstance(self._target, SyncAdapterEngine)
        self._target.unload_adapter(digest)


class LocalDrafter(_Local[DraftReplies]):
    """interfaces.Drafter over a SyncDraftEngine in this process; for other arguments see ``_Local``.

    Args:
        dies_after: batches answered before the connection is lost.
        hangs_after: batches answered before it stops answering.
    """

    def __init__(
        self,
        engine: SyncDraftEngine,
        clock: Clock,
        *,
        transport: FakeTransport | None = None,
        dies_after: int | None = None,
        hangs_after: int | None = None,
    ) -> None:
        super().__init__(engine, clock, transport)
        self._draft = engine
        self._dies_after = dies_after
        self._hangs_after = hangs_after
        self.num_calls = 0

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        await self.release(released)
        if self.num_calls == self._dies_after:
            self.lose()
            self._wire.check()
        if self.num_calls == self._hangs_after:
            self.hang()
        self.num_calls += 1
        self._wire.answer(self._draft.speculate(items))


class FakeDrafterSource:
    """interfaces.DrafterSource with drafters that a test makes.

    Args:
        make: makes the drafter of a lease, given its number from 0 on; may raise EngineLostError.
    """

    def __init__(self, make: Callable[[int], Drafter]) -> None:
        self._make = make
        self.num_leases = 0

    async def lease(self) -> Drafter:
        number = self.num_leases
        self.num_leases += 1
        return self._make(number)
