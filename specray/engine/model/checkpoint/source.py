"""The seam between a model's files and the decoder: its weights by name, whole or in part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from specray.engine.model.checks.weights import check_weight
from specray.engine.weights.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A run of a weight's rows (``dim`` 0) or columns (``dim`` 1): ``start <= index < stop``."""

    dim: int
    start: int
    stop: int


class WeightSource(Protocol):
    """Where a decoder's weights come from."""

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """A contiguous weight, maybe a read-only view of a file. ConfigError: unreadable, NaN or infinite."""
        ...

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        """A linear layer's weight in the file's own bits; of one stacked expert, ``[out, in]``.

        None: it is plain there, this part of it cuts a block, or own bits are not wanted. Raises as
        :meth:`take`.
        """
        ...


class NamedWeights(ABC):
    """Weights by name, which may be changed.

    Args:
        path: name of the checkpoint for messages.
        shapes: of every weight, by its first name.
    """

    def __init__(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path = path
        self.shapes = dict(shapes)
        """Every weight, by its present name."""
        self._names = {name: name for name in shapes}
        self._wide: frozenset[str] = frozenset()

    def rename(self, names: Mapping[str, str]) -> None:
        self._names = {name: self._names[present] for name, present in names.items()}
        self.shapes = {name: self.shapes[present] for name, present in names.items()}

    def keep_wide(self, names: frozenset[str]) -> None:
        """Leaves float32 numbers of these weights as they are, whatever the data type of the others."""
        self._wide = names & self._names.keys()

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """A weight, or a part of it. Raises ConfigError for one that is damaged or not finite."""
        tensor = self.read(name, part)
        check_weight(self._path, name, tensor)
        return tensor

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        """A weight, or a part of it, in the file's own bits; None: :meth:`take` gives its numbers."""
        return None

    @property
    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of each weight that :meth:`stored` gives whole."""
        return {}

    @property
    def stored_formats(self) -> Mapping[str, str]:
        """Names of the formats of these weights."""
        return {}

    @abstractmethod
    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
