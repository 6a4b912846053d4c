"""Programs as children of this process: with a deadline, watched, and ended whatever happens."""

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

POLL_S = 0.1
"""Seconds between two looks at a child."""
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


class Child:
    """A command that runs beside this process; its output goes to files."""

    def __init__(
        self, command: Sequence[str], *, directory: Path, environment: Mapping[str, str], deadline_s: float
    ) -> None:
        """Starts it.

        Args:
            directory: where its output goes, as files.
            environment: variables besides those of this process.
            deadline_s: seconds after which it is ended.
        """
        self._output, self._errors = directory / "output", directory / "errors"
        self._end_s = time.monotonic() + deadline_s
        with self._output.open("wb") as stdout, self._errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | environment,
                # An interrupt of the terminal comes here alone, and ends the child in order.
                start_new_session=True,
            )

    def ended(self, wait_s: float = 0.0) -> Ended | None:
        """How it ended, at its deadline at the latest; None: it still runs after this wait."""
        with suppress(subprocess.TimeoutExpired):
            return self._ended(self._process.wait(wait_s))
        if time.monotonic() < self._end_s:
            return None
        self.end()
        return self._ended(None)

    def end(self) -> None:
        """Ends it, if it still runs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def _ended(self, returncode: int | None) -> Ended:
        return Ended(returncode, _tail(self._output), _tail(self._errors))


def run_child(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    deadline_s: float,
    tick: Callable[[], None],
) -> Ended:
    """Runs a command to its end, see :class:`Child`; ``tick`` is called ten times a second."""
    with ending_on_sigterm():
        child = Child(command, directory=directory, environment=environment, deadline_s=deadline_s)
        try:
            while True:
                tick()
                if (ended := child.ended(POLL_S)) is not None:
                    return ended
        finally:
            child.end()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command of a module of Python's, which ends with this process (see ``tied``)."""
    return [sys.executable, "-m", "specray.models.tied", module, *arguments]


def _tail(path: Path) -> str:
    return path.read_text("utf-8", "replace")[-_MAX_CHARS:]


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind this process, so that no child outlives it."""
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
