"""The seam between a model's files and the decoder: its weights by name, whole or in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a weight's rows (``dim`` 0) or columns (``dim`` 1): ``start <= index < stop``."""

    dim: int
    start: int
    stop: int


class WeightSource(Protocol):
    """Where a decoder's weights come from."""

    def take(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A weight in the model's data type, on its device, contiguous.

        It may be a view of a file: nobody writes to it, and who keeps it as it is keeps a copy.

        Raises:
            ConfigError: it cannot be read, or holds NaN or infinite values.
        """
        ...


class InMemoryWeights:
    """Implements :class:`WeightSource` over tensors that are there already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, part: Part | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        if part is not None:
            tensor = tensor.narrow(part.dim, part.start, part.stop - part.start)
        return tensor.contiguous()
