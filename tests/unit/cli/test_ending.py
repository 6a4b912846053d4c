"""Tests of signals that end commands, and the servers that those started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specray.bench.compare.peers.process import free_port
from specray.cli.ending import EXIT_INTERRUPTED

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
