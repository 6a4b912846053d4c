"""Starts a server as a process group, waits until it is ready, and ends it with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from specray.bench.compare.peers.base import Launch
from specray.errors import EngineLostError

LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.25
PROBE_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 60.0
NEVER_EPHEMERAL = range(20_000, 32_768)
"""Range of ports that the system does not hand out. Ray's processes take a dozen of those it does while a
server starts: once Ray's metrics answered in place of the server. Ray's workers take ports below 20,000."""
_MAX_TRIES = 100


def free_port() -> int:
    """Returns a free TCP port of the loopback interface in NEVER_EPHEMERAL.

    Raises:
        EngineLostError: none of many is free.
    """
    for _ in range(_MAX_TRIES):
        port = random.choice(NEVER_EPHEMERAL)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    first, last = NEVER_EPHEMERAL[0], NEVER_EPHEMERAL[-1]
    raise EngineLostError(f"none of {_MAX_TRIES} ports of {first} to {last} is free")


@asynccontextmanager
async def running(launch: Launch, log_path: Path, *, start_timeout_s: float) -> AsyncIterator[str]:
    """Runs the server while the block runs; it is ready when the block starts.

    Args:
        log_path: file for the command line and the output; replaced if it exists.

    Yields:
        The server's URL.

    Raises:
        EngineLostError: the server ended before it was ready, or was not ready in time.
    """
    with log_path.open("wb") as log:
        log.write(f"{shlex.join(launch.argv)}\n".encode())
        log.flush()
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            await _wait_until_ready(process, launch, log_path, start_timeout_s)
            yield launch.url
        finally:
            await _stop(process)


async def _wait_until_ready(
    process: asyncio.subprocess.Process, launch: Launch, log_path: Path, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not await _answers(session, launch.url + launch.ready_path):
            if process.returncode is not None:
                raise EngineLostError(
                    f"{launch.command[0]} ended with {process.returncode} before it was ready: "
                    f"{_last_lines(log_path)}"
                )
            if time.monotonic() > end:
                raise EngineLostError(f"{launch.command[0]} was not ready within {timeout_s:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        # Not SIGINT: processes that a shell starts in the background ignore it.
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _last_lines(log_path: Path) -> str:
    _, *printed = log_path.read_text(errors="replace").splitlines()
    lines = [line for line in printed if line.strip()]
    return " | ".join(lines[-3:]) or "it printed nothing"
