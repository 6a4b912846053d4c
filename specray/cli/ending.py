"""The end of commands that start processes: a signal cancels them, so that they end those first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

EXIT_INTERRUPTED = 130
ResultT = TypeVar("ResultT")


def run_until_told(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs a coroutine as ``asyncio.run`` does; SIGINT and SIGTERM cancel it, even if SIGINT was ignored.

    Raises:
        typer.Exit: the coroutine was cancelled, and has ended what it had started.
    """

    async def run() -> ResultT:
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise typer.Exit(EXIT_INTERRUPTED) from None
