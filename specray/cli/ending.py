"""The end of commands that start processes: all of those end with them, whatever hangs."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeVar

import typer

from specray.bench.testbed.tree import adopt_orphans, end_all
from specray.rpc.workers.parent import end_with_parent

EXIT_INTERRUPTED = 130
EXIT_FAILED = 1
PATIENCE_S: Final = 55.0
"""Seconds after a signal that an orderly end may take, unless the command says otherwise."""
REPEAT_S: Final = 1.0
"""Seconds in which signals count as one: `timeout` and some shells send theirs twice."""
ResultT = TypeVar("ResultT")


def run_until_told(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs a coroutine as ``asyncio.run`` does; SIGINT and SIGTERM cancel it, even if SIGINT was ignored.

    Raises:
        typer.Exit: the coroutine was cancelled, and has ended what it had started.
    """

    async def run() -> ResultT:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "it runs in a task"
        asked_s = -math.inf

        def ask() -> None:
            nonlocal asked_s
            if now_s() - asked_s > REPEAT_S:
                asked_s = now_s()
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask)
        return await main

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise typer.Exit(EXIT_INTERRUPTED) from None


class Guardian:
    """What a guarded command says to the process that guards it, see :func:`guarded`."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, struct.calcsize("d"))
        self.patience_s = PATIENCE_S

    @property
    def patience_s(self) -> float:
        """Seconds that an orderly end may take after a signal."""
        return float(struct.unpack("d", self._shared[:])[0])

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._shared[:] = struct.pack("d", seconds)


def guarded() -> Guardian | None:
    """Splits this process: returns in a child, which goes on; the parent guards it and never returns.

    The first SIGINT, SIGTERM or SIGHUP asks the child to end. A second one, or the end of the child's
    patience, kills it. When it has ended, in whatever way, every process below it is killed, and the parent
    ends with its exit code. The parent calls nothing that could hang. Call it while there is one thread.

    Returns:
        None where the system cannot adopt orphans; nothing is guarded there.
    """
    if sys.platform != "linux":
        return None
    guardian = Guardian()
    adopt_orphans(True)
    # `nohup` ignores SIGHUP, which would be found here although it is ignored.
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ending = {signal.SIGINT, signal.SIGTERM, *(() if is_nohup else (signal.SIGHUP,))}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child:
        raise SystemExit(_guard(child, guardian, ending))
    # The terminal's Ctrl-C is the guardian's.
    os.setpgid(0, 0)
    # A shell starts what runs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    end_with_parent(parent)
    return guardian


def _guard(child: int, guardian: Guardian, ending: AbstractSet[int]) -> int:
    """Returns the exit code, when no process is left."""
    try:
        return _wait(child, guardian, ending)
    finally:
        end_all(set())


def _wait(child: int, guardian: Guardian, ending: AbstractSet[int]) -> int:
    asked_s, deadline_s = math.inf, math.inf
    while (status := _end_of(child)) is None:
        found = signal.sigtimedwait({*ending, signal.SIGCHLD}, min(1.0, max(0.0, deadline_s - now_s())))
        number = signal.SIGCHLD if found is None else found.si_signo
        is_asked = number in ending
        if is_asked and asked_s == math.inf:
            asked_s, deadline_s = now_s(), now_s() + guardian.patience_s
            os.kill(child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif is_asked and now_s() - asked_s > REPEAT_S:
            _say("killing every process")
            return EXIT_INTERRUPTED
        elif now_s() >= deadline_s:
            _say(f"not ended after {guardian.patience_s:g} s; killing every process")
            return EXIT_FAILED
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and asked_s < math.inf:
        # Before it caught signals.
        return EXIT_INTERRUPTED
    if code < 0:
        _say(f"its main process was ended by {signal.Signals(-code).name}")
        return EXIT_FAILED
    return code


def _end_of(child: int) -> int | None:
    """Collects all processes that have ended; returns the child's status, or None while it runs."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def now_s() -> float:
    return time.monotonic()


def _say(text: str) -> None:
    print(f"specray: {text}", file=sys.stderr, flush=True)
