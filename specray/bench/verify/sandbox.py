"""Runs a program that a model has written in a process of its own, with limits, and says whether it passed.

The limits keep a faulty program from taking the machine with it: processor time, memory, files, processes and
a deadline; it starts in an empty directory with an empty environment. They do not stop a malicious one: where
that matters, run the whole command in a container without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from typing import Final

TIMEOUT_S: Final = 10.0
"""Seconds for one program."""
_PASSED: Final = 42
"""Exit status behind a whole program: one that exits on its own has not passed."""
_BOOTSTRAP: Final = """
import resource, sys
cpu_s, memory, file_size = map(int, sys.argv[1:])
for limit, value in (
    (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file_size),
    (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
program = sys.stdin.read()
sys.stdin = open("/dev/null")
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
import os
os._exit(PASSED)
""".replace("PASSED", str(_PASSED))


async def passes(program: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether a Python program runs to its end, without an error, within its limits."""
    with tempfile.TemporaryDirectory(prefix="specray-task-") as directory:
        # Bytes of address space for one program.
        limits = (str(int(timeout_s) + 1), str(1 << 30), str(1 << 20))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _BOOTSTRAP,
            *limits,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=directory,
            env={},
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(process.communicate(program.encode("utf-8", "replace")), timeout_s)
        except TimeoutError:
            return False
        finally:
            # What it started ends with it, and it ends however this function is left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return process.returncode == _PASSED
