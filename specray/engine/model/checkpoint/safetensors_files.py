"""Weights straight from safetensors files: each is read once, in the part that this rank needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specray.engine.model.checkpoint.headers import INDEX, SINGLE
from specray.engine.model.checkpoint.source import Part
from specray.engine.model.checks.messages import one_line
from specray.engine.model.checks.weights import is_finite
from specray.errors import ConfigError


class SafetensorsWeights:
    """Implements ``source.WeightSource``. Files are mapped into memory, and read where a weight is taken.

    Args:
        path: as the user wrote it, for messages.
        directory: the files'.
        dtype, device: of the tensors that :meth:`take` gives.
        entry: name of the one file, or of the index of several; None: the usual names.

    Raises:
        ConfigError: a file is missing or damaged.
    """

    def __init__(
        self,
        path: str,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        entry: str | None = None,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._places: dict[str, tuple[Any, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Every tensor of the files."""
        try:
            for file in _files(directory, entry):
                self._open(file)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise self._unreadable(error) from None

    def _open(self, file: Path) -> None:
        opened: Any = safe_open(str(file), framework="pt", device="cpu")
        names: list[str] = list(opened.keys())
        for name in names:
            self._places[name] = (opened, name)
            self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors the names under which they are taken: new name to the file's own."""
        self._places = {name: self._places[stored] for name, stored in names.items()}
        self.shapes = {name: self.shapes[stored] for name, stored in names.items()}

    def take(self, name: str, part: Part | None = None) -> torch.Tensor:
        tensor = self.read(name, part)
        if tensor.numel() and not is_finite(tensor):
            raise ConfigError(f"model {self._path!r}: the weight {name!r} holds NaN or infinite values")
        return tensor

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """As :meth:`take`, whatever the values are."""
        file, stored = self._places[name]
        try:
            if part is None:
                tensor = file.get_tensor(stored)
            elif part.dim == 0:
                tensor = file.get_slice(stored)[part.start : part.stop]
            else:
                tensor = file.get_slice(stored)[:, part.start : part.stop]
            # A copy in any case: what stays must not depend on a file that may be replaced.
            read: torch.Tensor = tensor.to(device=self._device, dtype=self._dtype, copy=True).contiguous()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._unreadable(error) from None
        return read

    def _unreadable(self, error: BaseException) -> ConfigError:
        return ConfigError(f"model {self._path!r} cannot be loaded: {one_line(error)}")


def _files(directory: Path, entry: str | None) -> list[Path]:
    """The files with the model's tensors; OSError, ValueError or KeyError where they cannot be found."""
    name = entry or (SINGLE if (directory / SINGLE).is_file() else INDEX)
    if not name.endswith(".index.json"):
        return [directory / name]
    if entry is None and not (directory / name).is_file():
        raise OSError(f"Error no file named {SINGLE} found in directory {directory}.")
    listed = json.loads((directory / name).read_text("utf-8"))["weight_map"]
    return [directory / file for file in sorted(set(listed.values()))]
