"""A stand-in for CUDA graphs: records the operators of some work, and runs them again into the same tensors.

What a graph would freeze is frozen here too: numbers that the host has read, and shapes. What cannot be
captured fails: operators for which the host waits. Kernels that are none of torch's are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Output = TypeVar("Output")
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

Entry = tuple[Any, Any, Any, Any]
"""Operator, its arguments, those with names, and its result."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        assert name not in _WAITING, f"{name} waits for the device"
        result = func(*args, **kwargs)
        self.entries.append((func, args, kwargs, result))
        return result


class Tape:
    """Implements ``cuda_graphs.Capture``."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, work: Callable[[], Output]) -> Callable[[], Output]:
        # As before a capture: what is made by a first run is not part of it.
        work()
        with _Recorder() as recorder:
            output = work()
        self.num_captures += 1

        def replay() -> Output:
            self.num_replays += 1
            for func, args, kwargs, result in recorder.entries:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    # Views, and what was changed in place, are where they were.
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
            return output

        return replay
