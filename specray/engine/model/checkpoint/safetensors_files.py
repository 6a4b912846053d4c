"""Weights straight from safetensors files: each is read once, in the part that this rank needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specray.engine.model.checkpoint.headers import INDEX, SINGLE
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.checks.messages import one_line
from specray.errors import ConfigError
from specray.json_files import read_json_file

REOPEN_BYTES = 1 << 28
"""Bytes taken from a file after which it is mapped anew: pages that were read count as this process's."""


class SafetensorsWeights(NamedWeights):
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
        self._path, self._dtype, self._device = path, dtype, device
        self._places: dict[str, _MappedFile] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        try:
            for file in _files(directory, entry):
                mapped = _MappedFile(file)
                found = mapped.shapes()
                shapes |= found
                self._places |= dict.fromkeys(found, mapped)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise self._unreadable(error) from None
        super().__init__(path, shapes)

    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
        tensor = self.raw(name, part)
        is_kept = tensor.dtype == torch.float32 and name in self._wide
        try:
            return tensor.to(device=self._device, dtype=tensor.dtype if is_kept else self._dtype).contiguous()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._unreadable(error) from None

    def num_bytes(self, name: str) -> int:
        stored = self._names[name]
        return self._places[stored].num_bytes(stored)

    def raw(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor, or a part of it, as the file has it."""
        stored = self._names[name]
        try:
            return self._places[stored].read(stored, part)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: BaseException) -> ConfigError:
        return ConfigError(f"model {self._path!r} cannot be loaded: {one_line(error)}")


class _MappedFile:
    """One file, whose tensors are views of it. Raises what safetensors raises for a damaged one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._mapping: Any = self._map()
        self._num_bytes = 0

    def _map(self) -> Any:
        return safe_open(str(self._file), framework="pt", device="cpu")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._mapping.get_slice(name).get_shape()) for name in self._mapping.keys()}  # noqa: SIM118

    def num_bytes(self, name: str) -> int:
        tensor: torch.Tensor = self._mapping.get_tensor(name)
        return tensor.nbytes

    def read(self, name: str, part: WeightPart | None) -> torch.Tensor:
        if self._num_bytes > REOPEN_BYTES:
            self._mapping, self._num_bytes = self._map(), 0
        tensor: torch.Tensor
        if part is None:
            tensor = self._mapping.get_tensor(name)
        elif part.dim == 0:
            tensor = self._mapping.get_slice(name)[part.start : part.stop]
        else:
            tensor = self._mapping.get_slice(name)[:, part.start : part.stop]
        self._num_bytes += tensor.nbytes
        return tensor


def _files(directory: Path, entry: str | None) -> list[Path]:
    """The files with the model's tensors; OSError, ValueError or KeyError where they cannot be found."""
    name = entry or (SINGLE if (directory / SINGLE).is_file() else INDEX)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"transformers_weights is {entry!r}; allowed: a file in the model's directory")
    if not name.endswith(".index.json"):
        return [directory / name]
    if entry is None and not (directory / name).is_file():
        raise OSError(f"Error no file named {SINGLE} found in directory {directory}.")
    listed = read_json_file(directory / name)["weight_map"]
    return [directory / file for file in sorted(set(listed.values()))]
