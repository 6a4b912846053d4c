"""Output of the commands: tables on the terminal, progress bars, and the files that options name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specray.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def wide_console() -> Console:
    """A console for stdout that does not cut tables at 80 columns when they go to a file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # Width of tables in columns where the output is no terminal.
        console.width = 120
    return console


def print_rows(title: str, rows: Sequence[Any], json_path: Path | None) -> None:
    """Prints equal dataclasses as a table with one column per field, and writes them to ``--json``."""
    from rich.console import Console
    from rich.table import Table

    values = [asdict(row) for row in rows]
    table = Table(*values[0], title=title)
    for row in values:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console().print(table)
    write_json(values, json_path)


def report_failures(failures: Sequence[str]) -> int:
    """Prints failed requests on stderr.

    Returns:
        The exit code: 1 when there are any.
    """
    from rich.console import Console

    for failure in failures:
        Console(stderr=True).print(f"failed: {failure}", markup=False)
    return 1 if failures else 0


@contextmanager
def counted_progress(first: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on stderr until the block ends.

    Args:
        first: the text until the first update.

    Yields:
        A function of the current text, the number done and the number of all.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(first, total=None)

        def show(name: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=name, completed=num_done, total=num_all)

        yield show


def write_json(values: object, path: Path | None) -> None:
    """Writes the results to the file of ``--json``, if there is one. Raises ConfigError."""
    if path is not None:
        write_text(path, json.dumps(values, indent=2) + "\n", "--json")


def write_text(path: Path, text: str, option: str) -> None:
    """Writes the file that an option names. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def make_directory(path: Path, option: str) -> None:
    """Makes the directory that an option names. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None
