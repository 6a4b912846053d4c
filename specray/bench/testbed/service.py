"""Runs a service under test, wherever it lives: starts it, asks for its parts, and ends everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from specray.bench.testbed.parts import Part
from specray.config import Config
from specray.errors import EngineLostError

STOP_TIMEOUT_S = 60.0


class Control:
    """Client of ``specray.bench.testbed.control``: one question at a time."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._lock = asyncio.Lock()
        self._num_calls = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    async def parts(self) -> tuple[Part, ...]:
        """Returns the living actors of the service, oldest first. Raises EngineLostError."""
        return tuple(Part.from_json(values) for values in await self.call("parts"))

    async def running(self) -> dict[str, int]:
        """Returns the number of ready replicas by deployment. Raises EngineLostError."""
        counts: dict[str, int] = await self.call("running")
        return counts

    async def call(self, operation: str, *arguments: str, timeout_s: float = 60.0) -> Any:
        """Runs an operation. Raises EngineLostError if it fails, or is not done in time."""
        assert self._process.stdin is not None
        async with self._lock:
            self._num_calls += 1
            question = {"id": self._num_calls, "op": operation, "arguments": arguments}
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
                return await self.read(timeout_s)
            except OSError as error:
                raise EngineLostError(f"the service's control process: {error}") from None

    async def read(self, timeout_s: float) -> Any:
        """Reads the answer to the last question; those to questions given up come before it."""
        assert self._process.stdout is not None
        reply: dict[str, Any] = {}
        line = b"{}"
        try:
            async with asyncio.timeout(timeout_s):
                while line and reply.get("id") != self._num_calls:
                    line = await self._process.stdout.readline()
                    reply = json.loads(line or "{}")
        except TimeoutError:
            raise EngineLostError(f"the service under test did not answer within {timeout_s:g} s") from None
        if not line:
            raise EngineLostError(f"the service under test ended: {self._last_words()}")
        if "error" in reply:
            raise EngineLostError(f"the service under test: {reply['error']}")
        return reply["value"]

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-5:]) or "without a word"


@asynccontextmanager
async def controlled(
    config: Config,
    *,
    mode: str,
    directory: Path,
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
) -> AsyncIterator[Control]:
    """Starts the service in a process of its own; yields when it is ready.

    Args:
        mode: local (a Ray of its own), cluster (two nodes of one) or join (``RAY_ADDRESS``).
        directory: directory for its configuration and output.
        environment: additional environment variables.
        prefix: prefix of a command that runs it where the service is to be.

    Raises:
        EngineLostError: it did not start, or not in time.
    """
    path, log = directory / "config.yaml", directory / "service.log"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "specray.bench.testbed.control",
            str(path),
            f"--mode={mode}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            limit=1 << 20,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        control = Control(process, log)
        await control.read(max(1, len(config.models)) * config.router.start_timeout_s + STOP_TIMEOUT_S)
        yield control
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
