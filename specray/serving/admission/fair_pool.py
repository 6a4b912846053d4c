"""Runs work of calls in threads, in turns that are fair between tenants, with a deadline for each wait.

The order is the Router's, ``router.admission.fair``: start-time fair queueing, here over the microseconds for
which a tenant's work has kept a thread. So whatever one tenant sends, another one's next work waits for what
runs and for at most one of each other tenant's.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from specray.errors import DeadlineExceededError, OverloadedError
from specray.router.admission.fair import FairQueue

MAX_WAIT_S: Final = 10.0
"""Longest wait for a thread in seconds, whatever a caller's own deadline allows."""

ResultT = TypeVar("ResultT")


class Turn(NamedTuple):
    """A claim to a thread: for whom work is done, and until when it is of use."""

    tenant: str = ""
    deadline_s: float | None = None
    """Time on the event loop's clock; None: none."""


ANYBODY: Final = Turn()


@dataclass(slots=True, eq=False)
class _Waiting:
    """An entry of the queue; its tokens are microseconds."""

    request_id: str
    tenant: str
    place: asyncio.Future[None]
    """Done when a thread is free for it."""
    num_expected_tokens: int
    priority: int = 0
    num_queued_tokens: int = 0
    is_queued: bool = True


class FairPool:
    """Threads of one kind of work; used from one event loop.

    Args:
        num_threads: works that run at a time.
        name: begins the threads' names.
        what: names in errors what calls wait for, in the plural.
        max_per_tenant: threads that one tenant's works have at a time; default: all.
        max_wait_s: longest wait for a thread in seconds.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        what: str,
        max_per_tenant: int | None = None,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        self._max_per_tenant = max_per_tenant or num_threads
        self._running: Counter[str] = Counter()
        """Threads by the tenant that has them."""
        self._what = what
        self._max_wait_s = max_wait_s
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._names = map(str, itertools.count())

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def run(
        self, work: Callable[[], ResultT], turn: Turn = ANYBODY, *, expected_s: float = 1e-3
    ) -> ResultT:
        """Returns what ``work`` returns in a thread.

        Work that has begun goes on in its thread when its caller has left, and keeps its place until then.

        Args:
            expected_s: seconds that the work should take; what it took is charged in the end.

        Raises:
            DeadlineExceededError: the turn's deadline has passed; work that waited is not done.
            OverloadedError: no thread was free for ``max_wait_s``.
            Exception: what ``work`` raises.
        """
        loop = asyncio.get_running_loop()
        entry = _Waiting(next(self._names), turn.tenant, loop.create_future(), int(expected_s * 1e6))
        await self._wait(entry, turn)
        context = contextvars.copy_context()
        running = asyncio.wrap_future(self._threads.submit(context.run, work))
        running.add_done_callback(partial(self._ended, entry, loop.time()))
        try:
            async with asyncio.timeout_at(turn.deadline_s):
                return await asyncio.shield(running)
        except TimeoutError:
            if running.done() and not running.cancelled():
                return running.result()  # It is the work's own error, or it has just ended.
            raise DeadlineExceededError(f"the time was over during work on the call's {self._what}") from None

    async def _wait(self, entry: _Waiting, turn: Turn) -> None:
        latest_s = asyncio.get_running_loop().time() + self._max_wait_s
        is_own = turn.deadline_s is not None and turn.deadline_s < latest_s
        self._queue.push(entry)
        self._hand_out()
        try:
            async with asyncio.timeout_at(turn.deadline_s if is_own else latest_s):
                await entry.place
        except TimeoutError:
            self._give_up(entry)
            if is_own:
                raise DeadlineExceededError(
                    f"the time was over while the call waited for {self._what}"
                ) from None
            raise OverloadedError(
                f"the call waited {self._max_wait_s:g} s for the {self._what} of others"
            ) from None
        except BaseException:
            self._give_up(entry)
            raise

    def _give_up(self, entry: _Waiting) -> None:
        """Takes out an entry whose caller has left; it may have got its thread at that moment."""
        if entry.is_queued:
            self._queue.remove(entry)
        else:
            self._free(entry, 0)

    def _hand_out(self) -> None:
        while self._num_free:
            sated = {tenant for tenant, num in self._running.items() if num >= self._max_per_tenant}
            if self._queue.lines.keys() <= sated:
                return
            entry = self._queue.pop(sated)
            entry.is_queued = False
            self._num_free -= 1
            self._running[entry.tenant] += 1
            if not entry.place.done():  # A caller that has just left gives its place back itself.
                entry.place.set_result(None)

    def _ended(self, entry: _Waiting, began_s: float, running: asyncio.Future[ResultT]) -> None:
        if not running.cancelled():
            running.exception()  # Its caller may have left: nobody else would look at it.
        self._free(entry, int((running.get_loop().time() - began_s) * 1e6))

    def _free(self, entry: _Waiting, taken_us: int) -> None:
        self._queue.refund(entry.tenant, entry.num_expected_tokens - taken_us)
        self._num_free += 1
        self._running[entry.tenant] -= 1
        self._running += Counter()  # Drops those that have none.
        self._hand_out()
