"""Tasks whose answers can be scored: programs that must pass their tests, and answers that must be a text."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from specray.bench.verify.sandbox import passes
from specray.errors import ConfigError


class TaskKind(StrEnum):
    HUMANEVAL = "humaneval"
    """openai/human-eval: JSON lines with ``prompt``, ``test`` and ``entry_point``; the program must pass."""
    ANSWERS = "answers"
    """JSON lines with ``prompt`` (or ``question``), ``target`` (or ``answer``) and perhaps ``until``, as
    lm-evaluation-harness has generated answers; the answer must be the target, but for space around it."""


@dataclass(frozen=True, slots=True)
class Task:
    prompt: str
    stops: tuple[str, ...]
    target: str = ""
    """The right answer; empty where a program is tested."""
    test: str = ""
    """Program behind the answer that fails where it is wrong."""

    async def is_solved(self, answer: str) -> bool:
        """Whether an answer is right. It may run a program: see ``sandbox``."""
        if self.test:
            return await passes(f"{self.prompt}{answer}\n{self.test}")
        return answer.strip() == self.target.strip()


def load_tasks(kind: TaskKind, path: Path, num_tasks: int) -> list[Task]:
    """Reads the first tasks of a file, plain or gzip.

    Raises:
        ConfigError: the file is missing, or is not of that kind.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open("r") as lines:
            tasks = list(itertools.islice(_read(kind, lines, path), num_tasks))
    except OSError as error:
        raise ConfigError(f"--tasks-path {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--tasks-path {path} is not JSON lines: {error}") from None
    if not tasks:
        raise ConfigError(f"--tasks-path {path}: there is no task in it")
    return tasks


def _read(kind: TaskKind, lines: Iterator[str], path: Path) -> Iterator[Task]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        task = _task(kind, entry) if isinstance(entry, dict) else None
        if task is None:
            raise ConfigError(f"--tasks-path {path}, line {number}: there is no task of {kind}")
        yield task


def _task(kind: TaskKind, entry: Mapping[str, Any]) -> Task | None:
    prompt = entry.get("prompt", entry.get("question"))
    if not isinstance(prompt, str) or not prompt:
        return None
    if kind is TaskKind.HUMANEVAL:
        test, name = entry.get("test"), entry.get("entry_point")
        if not isinstance(test, str) or not isinstance(name, str) or not name.isidentifier():
            return None
        # Texts behind which a function has ended, as openai/human-eval has them.
        return Task(
            prompt, ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("), test=f"{test}\ncheck({name})\n"
        )
    target, until = entry.get("target", entry.get("answer")), entry.get("until", ["\n"])
    stops: Sequence[Any] = [until] if isinstance(until, str) else until
    if not isinstance(target, str) or not isinstance(stops, list) or not all(map(_is_stop, stops)):
        return None
    return Task(prompt, tuple(stops), target=target)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and value != ""
