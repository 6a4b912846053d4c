"""A drafter's files: its configuration and its tensors, each taken by name and shape or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from specray.engine.model.checks.messages import one_line
from specray.errors import ConfigError, shown
from specray.json_files import read_json_file

_TENSOR_FILES = ("*.safetensors",)
_PICKLES = ("*.pt", "*.bin")
"""Names of files that authors' heads have besides or instead: pickles, which are not read."""
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.|inv_freq$)")
"""Tables that are computed, once saved with the weights."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MAX_LISTED = 4
_MAX_SCALE = float(np.finfo(np.float32).max)
"""Most that a factor may be: logits are float32."""


class DrafterFiles:
    """The tensors of a directory, under the names that a layout gives them, and its config.json.

    Args:
        path: directory of the checkpoint.

    Raises:
        ConfigError: a file is missing or damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"drafter {path!r} is no directory; allowed: one with a drafter's checkpoint")
        self.config = self._read_config(directory)
        self.tensors: dict[str, torch.Tensor] = self._read_tensors(directory)
        self._taken: set[str] = set()

    def refuse(self, problem: str) -> ConfigError:
        """The error for this drafter: what is wrong with it, and what is allowed."""
        return ConfigError(f"drafter {self.path!r}: {problem}")

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Gives tensors other names. Raises ConfigError where two would have the same."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if renamed(name) in tensors:
                raise self.refuse(f"{name} and another tensor are both {renamed(name)}; allowed: one of them")
            tensors[renamed(name)] = tensor
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of the shape. Raises ConfigError: it is missing, misshapen, quantised or not finite."""
        tensor = self._shaped(name, shape)
        self._check_float(name, tensor)
        if not bool(torch.isfinite(tensor).all()):
            raise self.refuse(f"{name} holds NaN or infinite values; allowed: numbers")
        self._taken.add(name)
        return tensor

    def take_whole_numbers(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of int64. Raises ConfigError: it is missing, of another shape or of other numbers."""
        tensor = self._shaped(name, shape)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise self.refuse(f"{name} holds {_dtype(tensor)}; allowed: int64, int32")
        self._taken.add(name)
        return tensor.to(torch.int64)

    def take_if_there(self, name: str, *shape: int) -> torch.Tensor | None:
        """Takes a tensor as :meth:`take` does; None for one that is missing."""
        return self.take(name, *shape) if name in self.tensors else None

    def pass_over(self, names: Iterable[str]) -> None:
        self._taken.update(names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a matrix. Raises ConfigError for one that is missing or no matrix."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.ndim != 2:
            found = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise self.refuse(f"{name} {found}; allowed: a matrix")
        # The shape of packed numbers would say nothing.
        self._check_float(name, tensor)
        return tuple(tensor.shape)

    def num_features(self, width: int, size: int, given: Any) -> int:
        """Features of the target, of ``size`` numbers each, that ``fc`` joins. Raises ConfigError.

        Args:
            width: numbers that ``fc`` reads.
            given: size of the target's features as the configuration has it; None: it does not say.
        """
        if given is not None and given != size:
            raise self.refuse(f"target_hidden_size is {given}; allowed: {size}, the target's")
        if width % size:
            raise self.refuse(f"fc.weight reads {width} numbers; allowed: a multiple of the target's {size}")
        return width // size

    def check_all_taken(self, layout: str) -> None:
        """Raises ConfigError for tensors that nobody has taken."""
        left = [name for name in self.tensors if name not in self._taken and not _COMPUTED.search(name)]
        if left:
            listed = ", ".join(sorted(left)[:_MAX_LISTED]) + ", ..." * (len(left) > _MAX_LISTED)
            raise self.refuse(f"{listed}: the {layout} layout has no place for them")

    def whole(self, name: str, default: int | None, *, section: dict[str, Any] | None = None) -> int:
        """A whole number above zero of the configuration. Raises ConfigError."""
        value = (self.config if section is None else section).get(name, default)
        if type(value) is not int or value < 1:
            raise self.refuse(f"{name} is {value!r}; allowed: a whole number above 0")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A mapping within the configuration, empty where there is none. Raises ConfigError."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(f"{name} is {shown(value)}; allowed: a mapping")
        return value or {}

    def scale(self, name: str, value: Any) -> float:
        """A factor of the configuration, 1 where there is none. Raises ConfigError for what is no factor."""
        if value is None:
            return 1.0
        if type(value) not in (int, float) or not 0 < value <= _MAX_SCALE:
            raise self.refuse(f"{name} is {value!r}; allowed: a number above 0, at most {_MAX_SCALE:g}")
        return float(value)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.refuse(f"{name} is missing; allowed: {list(shape)}")
        if tuple(tensor.shape) != shape:
            raise self.refuse(f"{name} is {list(tensor.shape)}; allowed: {list(shape)}")
        return tensor

    def _check_float(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _FLOATS:
            raise self.refuse(
                f"{name} holds {_dtype(tensor)}; allowed: float32, float16, bfloat16, float64 "
                "(a quantised drafter is not read)"
            )

    def _read_config(self, directory: Path) -> dict[str, Any]:
        try:
            values = read_json_file(directory / "config.json")
        except (OSError, ValueError) as error:
            raise self.refuse(f"config.json cannot be read: {one_line(error)}") from None
        if not isinstance(values, dict):
            raise self.refuse("config.json holds no mapping; allowed: one")
        return values

    def _read_tensors(self, directory: Path) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        files = sorted(file for pattern in _TENSOR_FILES for file in directory.glob(pattern))
        for file in files:
            try:
                tensors |= _safetensors(file)
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise self.refuse(f"{file.name} cannot be read: {one_line(error)}") from None
        if not files:
            pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
            found = f"{', '.join(pickles)} is a pickle" if pickles else "it holds no tensors"
            how = " (docs/drafting.md has the command that converts one)" if pickles else ""
            raise self.refuse(f"{found}; allowed: {', '.join(_TENSOR_FILES)}{how}")
        return tensors


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(str(file), framework="pt", device="cpu") as mapped:
        return {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118
