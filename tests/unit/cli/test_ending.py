"""Tests of signals that end commands, and the servers that those started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specray.bench.compare.peers.process import free_port
from specray.cli import main
from specray.cli.ending import EXIT_INTERRUPTED, REPEAT_S, run_until_told
from tests.processes import wait_gone

DEADLINE_S = 30.0
SERVING = """
import asyncio, sys
from pathlib import Path
from specray.bench.compare.peers import Launch, running
from specray.cli.ending import run_until_told

async def main(directory, port):
    command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", directory, port)
    launch = Launch(command, f"http://127.0.0.1:{port}", "/", {})
    async with running(launch, Path(directory, "log"), start_timeout_s=20.0):
        print("ready", flush=True)
        await asyncio.sleep(60.0)

import typer
try:
    run_until_told(main(*sys.argv[1:]))
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed on Linux alone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_that_is_measured_too(number: signal.Signals, tmp_path: Path) -> None:
    """SIGINT also as a shell starts what runs in the background: ignored."""
    command = [sys.executable, "-c", SERVING, str(tmp_path), str(free_port())]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (server,) = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == EXIT_INTERRUPTED
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


GUARDED = """
import os, signal, subprocess, sys, time
from specray.cli.ending import guarded

guardian = guarded()
guardian.patience_s = float(sys.argv[1])
# An orphan that hangs, as a worker of Ray whose raylet was killed.
made = subprocess.run(
    [sys.executable, "-c", "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL).pid)"],
    stdout=subprocess.PIPE, text=True, check=True,
)
os.kill(int(made.stdout), signal.SIGSTOP)
exec(sys.argv[2])
print(os.getpid(), made.stdout.strip(), flush=True)
exec(sys.argv[3])
"""
STUBBORN = "for number in (2, 15): signal.signal(number, lambda *_: print('asked', flush=True))"
FOR_EVER = "while True: time.sleep(60)"


class GuardedProcess:
    """A guarded process, with an orphan of its own that is stopped."""

    def __init__(
        self, first: str, then: str, *, patience_s: float = 600.0, hangup: signal.Handlers = signal.SIG_DFL
    ) -> None:
        # These tests may run under `nohup`, too.
        before = signal.signal(signal.SIGHUP, hangup)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", GUARDED, str(patience_s), first, then],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGHUP, before)
        assert self.process.stdout is not None
        self.pids = [int(word) for word in self.process.stdout.readline().split()]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[int, str]:
        """Waits for the end of all, with no more output; returns the exit code and what was said."""
        output, said = self.process.communicate(timeout=DEADLINE_S)
        assert output == ""
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        return self.process.returncode, said


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_exit_code_is_passed_back(number: signal.Signals) -> None:
    guarded = GuardedProcess("signal.signal(signal.SIGINT, lambda *_: os._exit(7))", FOR_EVER)
    guarded.process.send_signal(number)
    assert guarded.end() == (7 if number == signal.SIGINT else EXIT_INTERRUPTED, "")


@linux
def test_a_hangup_that_is_ignored_ends_nothing() -> None:
    """As `nohup` starts a service that is to outlive its terminal."""
    first = "signal.signal(signal.SIGINT, lambda *_: os._exit(7))"
    guarded = GuardedProcess(first, FOR_EVER, hangup=signal.SIG_IGN)
    guarded.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    guarded.process.send_signal(signal.SIGINT)
    assert guarded.end() == (7, "")


@linux
def test_a_second_signal_kills_at_once() -> None:
    guarded = GuardedProcess(STUBBORN, FOR_EVER)
    # A terminal's Ctrl-C goes to a whole group: the guarded process is in another, and is asked once.
    assert os.getpgid(guarded.pids[0]) == guarded.pids[0]
    os.killpg(guarded.process.pid, signal.SIGINT)
    assert guarded.line() == "asked\n"
    # The second of a pair that one request made does not count.
    guarded.process.send_signal(signal.SIGINT)
    time.sleep(REPEAT_S + 0.1)
    assert guarded.process.poll() is None
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.end() == (EXIT_INTERRUPTED, "specray: killing every process\n")


@linux
@pytest.mark.parametrize("then", [FOR_EVER, "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_the_end_of_patience_kills_whatever_hangs(then: str) -> None:
    # With a handler that says nothing: it is asked, or stopped.
    guarded = GuardedProcess(STUBBORN.replace("'asked'", "end=''"), then, patience_s=0.5)
    guarded.process.send_signal(signal.SIGINT)
    assert guarded.end() == (1, "specray: not ended after 0.5 s; killing every process\n")


@linux
def test_a_process_that_is_killed_or_ends_by_itself_leaves_nothing() -> None:
    guarded = GuardedProcess("", FOR_EVER)
    os.kill(guarded.pids[0], signal.SIGKILL)
    assert guarded.end() == (1, "specray: its main process was ended by SIGKILL\n")
    assert GuardedProcess("", "os._exit(3)").end() == (3, "")


@linux
def test_a_guarded_process_ends_when_its_guardian_is_killed() -> None:
    guarded = GuardedProcess("", "try: time.sleep(60)\nfinally: os._exit(0)")
    guarded.process.kill()
    assert guarded.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert wait_gone(guarded.pids[0])
    os.kill(guarded.pids[1], signal.SIGKILL)


def test_only_the_program_itself_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whoever calls it: a test of ours would go on twice."""
    monkeypatch.setattr("specray.cli.ending.guarded", lambda: pytest.fail("guarded"))
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--no-such-option"])


def test_two_signals_of_one_request_cancel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends its signal to the process and then to its group; a report comes after the first."""
    now_s = 100.0
    monkeypatch.setattr("specray.cli.ending.now_s", lambda: now_s)
    cancelled: list[float] = []

    async def main() -> str:
        nonlocal now_s
        for later_s, number in ((0.0, signal.SIGINT), (0.9, signal.SIGTERM), (1.1, signal.SIGINT)):
            now_s = 100.0 + later_s
            try:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                cancelled.append(later_s)
        return "report"

    assert run_until_told(main()) == "report"
    assert cancelled == [0.0, 1.1]
