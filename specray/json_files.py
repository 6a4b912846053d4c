"""JSON files of checkpoints, which strangers write: bounded in size and depth before anything reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specray.errors import ConfigError

_MAX_BYTES = 256 * 1024 * 1024
"""Bytes of a file; the largest tokenizer.json in use have about 40 MiB."""
_MAX_DEPTH = 64
"""Lists and objects within each other."""
_MAX_COUNTS = {"layers": 4096, "experts": 65_536, "heads": 65_536, "size": 2**28, "dim": 2**24}
"""Maximum of a number in config.json, by the last word of its name. Endless layers would hang a start."""


def read_json_file(file: Path, max_bytes: int = _MAX_BYTES) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, is larger than ``max_bytes``, or is nested deeper than 64.
    """
    size = file.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{file.name} has {size} bytes; allowed: at most {max_bytes}")
    return parse_json(file.name, file.read_bytes())


def parse_json(name: str, content: bytes) -> Any:
    """What the JSON in a file of that name says. ValueError: it is none, or is nested deeper than 64."""
    try:
        values = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{name} is nested too deep; allowed: {_MAX_DEPTH} levels") from None
    _check_depth(name, values)
    return values


def check_settings(directory: Path) -> None:
    """Checks the files of a checkpoint that libraries read.

    Raises:
        ConfigError: a file is too large or nested too deep, or config.json has a number beyond all models.
    """
    for file in sorted(directory.glob("*.json")):
        if any(file.match(pattern) for pattern in ("tokenizer.json", "vocab.json", "*.index.json")):
            continue
        try:
            # Bytes of a file that is not a vocabulary or an index.
            values = read_json_file(file, 16 * 1024 * 1024)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {str(directory)!r}: {file.name} cannot be read: {error}") from None
        if file.name == "config.json":
            _check_counts(directory, values)


def _check_depth(name: str, values: Any) -> None:
    level = [values]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for value in level
            if isinstance(value, (dict, list))
            for part in (value.values() if isinstance(value, dict) else value)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"{name} is nested too deep; allowed: {_MAX_DEPTH} levels")


def _check_counts(directory: Path, values: Any) -> None:
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            _check_counts(directory, value)
        most = _MAX_COUNTS.get(name.rpartition("_")[2])
        if most is not None and type(value) in (int, float) and not -most <= value <= most:
            raise ConfigError(f"model {str(directory)!r}: {name} is {value}; allowed: at most {most}")
