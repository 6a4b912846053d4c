"""Faults beside the service under test: other services on this machine, and a client that sends no end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from specray.bench.compare.peers.process import free_port
from specray.bench.testbed.beds import Bed
from specray.bench.testbed.tree import descendants
from specray.errors import EngineLostError

RAY_PARTS: Final = ("gcs_server", "raylet")
"""Programs of Ray without which a service cannot go on."""
SERVE_COMMAND: Final = (sys.executable, "-m", "specray.cli", "serve", "--target", "embedded")
READY: Final = b"Ctrl-C stops every process."
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
END_CODE: Final = 1
REFUSED_CODE: Final = 2
TAKEN: Final = "Address already in use"
HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 4 * 1024 * 1024
"""Bytes of a head that may be on their way in buffers of both ends when it is refused."""
_PART_BYTES = 64 * 1024


async def lose_ray(program: str, directory: Path) -> str:
    """Starts a service of its own, kills a program of its Ray, and waits for the service's end.

    Args:
        program: one of RAY_PARTS.
        directory: directory of its output.

    Raises:
        EngineLostError: it did not start, did not end by itself with code 1, or left a process.
    """
    async with _ready(directory / "ray-lost.log") as process:
        pids = descendants(process.pid)
        victims = [pid for pid in pids if _program(pid) == program]
        if not victims:
            raise EngineLostError(f"another service has no process {program}")
        os.kill(victims[0], signal.SIGKILL)
        began_s = time.monotonic()
        code = await _end(process, END_TIMEOUT_S)
        took_s = time.monotonic() - began_s
        if code != END_CODE:
            raise EngineLostError(f"a service without its {program} ended with {code}, not {END_CODE}")
        if left := [pid for pid in pids if _program(pid)]:
            raise EngineLostError(f"a service without its {program} has left {len(left)} processes")
    return f"another service without its {program} ended after {took_s:.1f} s"


async def start_on_taken_ports(bed: Bed) -> str:
    """Starts a service on the ports of the one under test. Raises EngineLostError if it is not refused."""
    http, grpc = bed.config.http, bed.config.grpc
    ports = ("--host", http.host, "--port", str(http.port), "--grpc-port", str(grpc.port))
    log = bed.directory / "second-service.log"
    async with _serving(ports, log, prefix=bed.prefix) as process:
        code = await _end(process, 60.0)
    said = _last_line(log)
    if code != REFUSED_CODE or TAKEN not in said:
        raise EngineLostError(f"a second service on the same ports ended with {code}: {said}")
    return f"another service: {said}"


async def send_endless_head(host: str, port: int) -> str:
    """Sends a header without end, until the server refuses it.

    Raises:
        EngineLostError: it has taken MAX_HEAD_BYTES, or kept the connection for HEAD_TIMEOUT_S.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
                while num_bytes < MAX_HEAD_BYTES and not reader.at_eof():
                    writer.write(b"x" * _PART_BYTES)
                    await writer.drain()
                    num_bytes += _PART_BYTES
            finally:
                writer.close()
    except TimeoutError:
        raise EngineLostError(f"a head that does not end was kept for {HEAD_TIMEOUT_S:g} s") from None
    # The server has closed the connection.
    except OSError:
        pass
    if num_bytes >= MAX_HEAD_BYTES:
        raise EngineLostError(f"{num_bytes} bytes of a head that does not end were taken")
    return f"{num_bytes} bytes of a head"


@asynccontextmanager
async def _serving(
    arguments: Sequence[str], log: Path, *, prefix: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts `specray serve` with the embedded target; kills it and all below it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="srb-", ignore_cleanup_errors=True) as ray_directory:
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                *SERVE_COMMAND,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "RAY_ADDRESS": "", "RAY_TMPDIR": ray_directory},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            for pid in (process.pid, *descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()


@asynccontextmanager
async def _ready(log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service that is ready, on a port that was free and that no other process has taken meanwhile."""
    for is_last in (False, False, True):
        arguments = ("--set", "draft.enabled=false", "--port", str(free_port()), "--grpc-port", "0")
        async with _serving(arguments, log) as process:
            try:
                await _wait_ready(process, log)
            except EngineLostError:
                if is_last or TAKEN not in _last_line(log):
                    raise
                continue
            yield process
            return


async def _wait_ready(process: asyncio.subprocess.Process, log: Path) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while READY not in await asyncio.to_thread(log.read_bytes):
        if process.returncode is not None or time.monotonic() > end_s:
            raise EngineLostError(f"another service did not start: {_last_line(log)}")
        await asyncio.sleep(0.5)


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> int | None:
    """Returns the exit code; None: it has not ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    return None


def _program(pid: int) -> str:
    """Name of a process's program; empty: it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return ""
    return Path(command.decode("utf-8", "replace")).name


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
