"""Weights that are computed from a checkpoint's tensors, under names of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from specray.engine.model.checkpoint.source import Part
from specray.engine.model.checks.weights import check_weight


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

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors the names under which they are taken: new name to the present one."""
        self._names = {name: self._names[present] for name, present in names.items()}
        self.shapes = {name: self.shapes[present] for name, present in names.items()}

    def take(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A weight, or a part of it. Raises ConfigError for one that is damaged or not finite."""
        tensor = self.read(name, part)
        check_weight(self._path, name, tensor)
        return tensor

    @abstractmethod
    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Returns a tensor as :meth:`take` does, without a look at its values."""
