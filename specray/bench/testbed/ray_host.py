"""Runs a Ray node on a host of its own, in the foreground of a process that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from specray.bench.testbed.control import NUM_CPUS_PER_NODE
from specray.bench.testbed.netns import Host
from specray.bench.testbed.tree import descendants
from specray.errors import EngineLostError

START_TIMEOUT_S = 90.0
AGENT_PORT = 52365
STARTED = b"Ray runtime started."


class RayHost:
    """Starts Ray on one host, and again after the host was lost.

    Args:
        resources: custom resources that the node offers.
        head_port: port of the GCS, for a head node; None: this node joins ``head_address``.
        environment: additional environment variables.
        directory: directory for Ray's output.
        ray_directory: directory with one below it for each start: hosts share no files.
    """

    def __init__(
        self,
        host: Host,
        *,
        resources: Mapping[str, float],
        environment: Mapping[str, str],
        directory: Path,
        ray_directory: Path,
        head_port: int | None = None,
        head_address: str | None = None,
    ) -> None:
        self._host = host
        self._environment = environment
        self._log = directory / f"ray-{host.name}.log"
        self._ray_directory = ray_directory
        self._num_starts = 0
        self._running: list[int] = []
        is_head = head_port is not None
        self._options = (
            *(("--head", f"--port={head_port}", "--include-dashboard=false") if is_head else ()),
            *(() if is_head else (f"--address={head_address}",)),
            f"--node-ip-address={host.address}",
            f"--num-cpus={NUM_CPUS_PER_NODE}",
            f"--resources={json.dumps(dict(resources))}",
            f"--object-store-memory={100 * 1024 * 1024}",
            "--disable-usage-stats",
            "--block",
        )

    async def start(self) -> None:
        """Starts the node; returns when it runs.

        Raises:
            EngineLostError: it does not; nothing is left of it.
        """
        self._num_starts += 1
        own = self._ray_directory / f"{self._host.name}{self._num_starts}"
        own.mkdir()
        # Nodes that follow each other on one host may overlap.
        options = (
            *self._options,
            f"--temp-dir={own}",
            f"--dashboard-agent-listen-port={AGENT_PORT + self._num_starts}",
        )
        num_before = self._num_said()
        command = (str(Path(sys.executable).with_name("ray")), "start", *options)
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._host.command(*command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, "RAY_TMPDIR": str(own)},
                start_new_session=True,
            )
        try:
            await self._wait_started(process, num_before)
        except BaseException:
            _kill(process.pid)
            raise
        self._running.append(process.pid)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def end_oldest(self) -> None:
        _kill(self._running.pop(0))

    def _num_said(self) -> int:
        return self._log.read_bytes().count(STARTED) if self._log.exists() else 0

    async def _wait_started(self, process: asyncio.subprocess.Process, num_before: int) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._num_said() <= num_before:
                    if process.returncode is not None:
                        raise EngineLostError(f"Ray on host {self._host.name} ended: {self._last_words()}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise EngineLostError(
                f"Ray on host {self._host.name} did not start within {START_TIMEOUT_S:g} s"
            ) from None

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-5:]) or "without a word"


def _kill(pid: int) -> None:
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
