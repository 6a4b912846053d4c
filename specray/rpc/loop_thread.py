"""Event loop on its own thread, for servers inside a process that others control, such as a Ray actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from specray.errors import EngineLostError
from specray.rpc.event_loop import new_event_loop

ResultT = TypeVar("ResultT")


class NoAnswerError(EngineLostError):
    """The loop did not finish a call in time, or does not run."""


class LoopThread:
    """Runs coroutines for callers on other threads, from construction until ``stop``, which is idempotent."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, ResultT], *, timeout_s: float) -> ResultT:
        """Runs a coroutine and returns its result; cancels it after ``timeout_s`` seconds.

        Raises:
            NoAnswerError: the loop does not run, or the time is over.
        """
        if not self.is_alive:
            coroutine.close()
            raise NoAnswerError(f"{self._thread.name} does not run")
        future: Future[ResultT] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise NoAnswerError(f"{self._thread.name} did not answer within {timeout_s:g} s") from None

    def stop(self, *, timeout_s: float = 5.0) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def run_on(loop: asyncio.AbstractEventLoop | None, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Awaits ``work`` on ``loop`` (None: on this one); cancelling the wait cancels the work."""
    if loop is None or loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
