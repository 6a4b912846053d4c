"""Processes of a test that have the engine imported from the start."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from specray.config import EngineConfig
from specray.engine.runner.gpu_claim import claim_gpu

END_TIMEOUT_S = 10.0


def preloaded_context() -> ForkServerContext:
    """Forks from one process that has imported torch and transformers, which is most of a rank's start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["specray.engine.build", "specray.engine.model.library", "specray.cli.app", "numba"]
    )
    return context


def answer_of(function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> Any:
    """What a function returns in such a process; its arguments and it are pickled."""
    context = preloaded_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), "the process did not answer"
        return ours.recv()
    finally:
        process.kill()
        process.join(END_TIMEOUT_S)


def _answer(connection: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    connection.send(function(*args))


class ForkedCommand:
    """``specray`` with some arguments, in a process that has everything imported, and a session of its own.

    Args:
        log: file for what it says on stderr.
        program: runs in place of ``specray``: finds the arguments in sys.argv, and returns its exit code.
        starts_ranks: it starts its other ranks as programs, as ever, and does not fork them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        program: Callable[[], int | None] | None = None,
        *,
        starts_ranks: bool = False,
    ) -> None:
        self.log = log
        ours, theirs = os.pipe()
        self._said, said = Connection(ours, writable=False), Connection(theirs, readable=False)
        self.process = preloaded_context().Process(
            target=_run_command, args=(arguments, said, log, program, starts_ranks)
        )
        self.process.start()
        said.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def first_words(self, timeout_s: float) -> str:
        """What it says first on stdout; empty: it has ended, or said nothing for so long."""
        is_there = self._said.poll(timeout_s)
        return os.read(self._said.fileno(), 4096).decode() if is_there else ""

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None: it has not ended."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        self.wait(END_TIMEOUT_S)
        self._said.close()

    # What ``specray.serving.local.pair`` asks of a worker that it starts.

    async def wait_ready(self, timeout_s: float) -> None:
        said = await asyncio.to_thread(self.first_words, timeout_s)
        assert said, self.log.read_text("utf-8", "replace")

    async def end(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.wait, END_TIMEOUT_S)
        self.close()


@asynccontextmanager
async def forked_worker(
    role: str, config_path: Path, command: Sequence[str], address: str, *, log_name: str | None = None
) -> AsyncIterator[ForkedCommand]:
    """A pair's worker, in place of its ``_worker``, where a program of its own is of no matter."""
    log = config_path.with_name(f"{log_name or role}.log")
    arguments = [role, f"--config={config_path}", f"--listen={address}"]
    worker = ForkedCommand(["worker", *arguments], log)
    try:
        yield worker
    finally:
        await worker.end()


class _ForkedRank(subprocess.Popen[bytes]):
    """Another rank of a worker, in a copy of the worker's process; anything else as ever."""

    def _execute_child(self, command: Sequence[str], *others: Any) -> None:
        if "worker" not in command:
            super()._execute_child(command, *others)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        from specray.cli.app import run

        code = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = run(command[command.index("worker") :])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _run_command(
    arguments: Sequence[str],
    said: Connection,
    log: Path,
    program: Callable[[], int | None] | None,
    starts_ranks: bool,
) -> None:
    from specray.cli.app import run

    if not starts_ranks:
        subprocess.Popen = _ForkedRank  # type: ignore[misc,assignment]
    os.setsid()
    os.dup2(said.fileno(), 1)
    said.close()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = arguments
    raise SystemExit(run(arguments) if program is None else program())


def hold_gpu(connection: Connection, directory: Path, num_gpus: float | None) -> None:
    """Takes GPU-1 as a draft, says so, and has it until the other end of the connection is closed."""
    options = {} if num_gpus is None else {"num_gpus": num_gpus}
    claim_gpu(EngineConfig(ray_actor_options=options), "draft", "GPU-1", directory=directory)
    connection.send("taken")
    with suppress(EOFError):
        connection.recv()
