"""Reads the headers of safetensors files: which tensors a model has, without the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.json_files import read_json_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 200_000_000
"""Bytes of a safetensors header; the format allows no more than half of it."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a safetensors file says of a tensor."""

    dtype: str
    """Name of the format's own: ``BF16``, ``F8_E4M3``, ..."""
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """The tensors of the safetensors files that the library would load; files that are damaged are left out.

    A damaged file is found when it is loaded, and the library says what is wrong with it.
    """
    headers: dict[str, TensorHeader] = {}
    for file in weight_files(directory):
        headers |= file_headers(file)
    return headers


def file_headers(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one file; none where it is damaged."""
    return {
        name: TensorHeader(str(entry.get("dtype")), tuple(entry.get("shape") or ()))
        for name, entry in _read_header(file).items()
        if isinstance(entry, dict) and name != "__metadata__"
    }


def weight_files(directory: Path, entry: str | None = None) -> list[Path]:
    """The files that hold the weights, as far as the directory tells; not all need exist.

    Args:
        entry: name of the one file, or of the index of several; None: the usual names.
    """
    if entry is not None and not entry.endswith(".index.json"):
        return [directory / entry]
    if entry is None and (directory / SINGLE).is_file():
        return [directory / SINGLE]
    listed = read_json(directory / (entry or INDEX)).get("weight_map")
    if isinstance(listed, Mapping):
        return [directory / name for name in sorted(set(map(str, listed.values())))]
    return sorted(directory.glob("*.safetensors"))


def _read_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            values = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds; empty where there is none."""
    try:
        values = read_json_file(file)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
