"""Runs a program as a child of this process: with a deadline, watched, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_POLL_S = 0.1
_END_S = 5.0
_EXIT_TERMINATED = 143
_MAX_CHARS = 20_000
"""Characters kept of what a child wrote, from the end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that has ended."""

    returncode: int | None
    """None: it was ended at its deadline."""
    output: str
    errors: str


def run_child(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    deadline_s: float,
    tick: Callable[[], None],
) -> Ended:
    """Runs a command to its end.

    Args:
        directory: where its output goes, as files.
        environment: variables besides those of this process.
        deadline_s: seconds after which it is ended.
        tick: called ten times a second.
    """
    output, errors = directory / "output", directory / "errors"
    with output.open("wb") as stdout, errors.open("wb") as stderr, _ending_on_sigterm():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | environment,
            # An interrupt of the terminal comes here alone, and ends the child in order.
            start_new_session=True,
        )
        try:
            returncode = _wait(process, time.monotonic() + deadline_s, tick)
        finally:
            _end(process)
    return Ended(returncode, _tail(output), _tail(errors))


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _wait(process: subprocess.Popen[bytes], end_s: float, tick: Callable[[], None]) -> int | None:
    while time.monotonic() < end_s:
        tick()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _tail(path: Path) -> str:
    return path.read_text("utf-8", "replace")[-_MAX_CHARS:]


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind this process, so that the child does not outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
