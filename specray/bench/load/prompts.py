"""Prompts for the benchmarks: data sets that papers use, read from files, and a few built in."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from specray.bench.load.own_texts import edit_prompts, json_prompts
from specray.errors import ConfigError


class Dataset(StrEnum):
    BUILTIN = "builtin"
    EDITS = "edits"
    """Renames in whole files of the package."""
    JSON = "json"
    """Lists of objects, to be written as JSON."""
    HUMANEVAL = "humaneval"
    """openai/human-eval: JSON lines with ``prompt``."""
    SPECBENCH = "specbench"
    """hemingkx/Spec-Bench: JSON lines with ``turns``, of which the first is used, and a ``category``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    category: str = ""
    """Name of its kind, as the data set gives it; empty where it gives none."""


BUILTIN_PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "def read_lines(path):\n    with open(path) as file:\n        ",
    "def binary_search(values, target):\n    low, high = 0, len(values) - 1\n    ",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        ",
    "def test_addition():\n    assert ",
    "for index, value in enumerate(values):\n    if value is None:\n        ",
    "try:\n    import json\nexcept ImportError:\n    ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        ",
    "@property\ndef name(self):\n    ",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(",
)


_OWN: Final[Mapping[Dataset, Callable[[], Sequence[str]]]] = MappingProxyType(
    {Dataset.BUILTIN: lambda: BUILTIN_PROMPTS, Dataset.EDITS: edit_prompts, Dataset.JSON: json_prompts}
)
"""Data sets that come with the package."""


def load_prompts(dataset: Dataset, path: Path | None, num_prompts: int) -> list[str]:
    """Returns the texts of ``load_labelled_prompts``. Raises like it."""
    return [prompt.text for prompt in load_labelled_prompts(dataset, path, num_prompts)]


def load_labelled_prompts(dataset: Dataset, path: Path | None, num_prompts: int) -> list[Prompt]:
    """Returns prompts of a data set; starts again from its beginning if it has fewer.

    Of Spec-Bench, which is sorted by category, they are spread evenly over all of it; of others, the first.

    Args:
        dataset: the data set.
        path: file of the data set, plain or gzip.
        num_prompts: number of prompts.

    Raises:
        ConfigError: the file is missing, or is not of that data set.
    """
    if dataset in _OWN:
        prompts = [Prompt(text) for text in _OWN[dataset]()]
    elif path is None:
        raise ConfigError(f"--dataset-path is missing; --dataset {dataset} needs its file")
    else:
        is_sorted = dataset is Dataset.SPECBENCH
        prompts = list(itertools.islice(_read(dataset, path), None if is_sorted else num_prompts))
        if len(prompts) > num_prompts:
            prompts = [prompts[index * len(prompts) // num_prompts] for index in range(num_prompts)]
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: there is no prompt in it")
    return list(itertools.islice(itertools.cycle(prompts), num_prompts))


def _read(dataset: Dataset, path: Path) -> Iterator[Prompt]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open("r") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _prompt(dataset, json.loads(line), f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON lines: {error}") from None


def _prompt(dataset: Dataset, entry: Any, where: str) -> Prompt:
    try:
        prompt = entry["prompt"] if dataset is Dataset.HUMANEVAL else entry["turns"][0]
    except (KeyError, IndexError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"--dataset-path {where}: there is no prompt of {dataset}")
    return Prompt(prompt, str(entry.get("category") or ""))
