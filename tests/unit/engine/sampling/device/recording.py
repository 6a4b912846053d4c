"""A stand-in for a GPU: tensors that say they are there, work on the CPU, and record what crosses over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
"""A device that torch starts nothing for; its tensors have no numbers of their own."""
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operators whose result, or its size, the host has to know."""


class Remote(torch.Tensor):
    """A tensor of :data:`DEVICE`; its numbers are those of ``inner``."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Remote:
        remote = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        remote.inner = inner
        return remote

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} runs outside of a recording")


class Recording(TorchDispatchMode):
    """While it is entered, tensors made for :data:`DEVICE` are :class:`Remote`, and crossings are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        """Copies ``in`` and ``out``, and operators that make the host wait, by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors: list[torch.Tensor] = []
        tree_map(
            lambda value: tensors.append(value) if isinstance(value, torch.Tensor) else None, (args, kwargs)
        )
        is_remote = any(isinstance(tensor, Remote) for tensor in tensors)
        # A number without dimensions may stay on the host beside tensors of a device.
        is_mixed = is_remote and any(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors)
        device = kwargs.get("device")
        goes = device is not None and torch.device(device).type != "cpu"
        name = func._schema.name.removeprefix("aten::")
        if is_remote and name in _WAITING:
            self.counts[name] += 1
        if is_remote and name.startswith("index") and _has_masks(args):
            self.counts["index by truth values"] += 1
        if name == "copy_" and is_mixed:
            self.counts["in" if isinstance(args[0], Remote) else "out"] += 1
        elif name == "_to_copy" and device is not None and goes != is_remote:
            self.counts["in" if goes else "out"] += 1
        else:
            assert not is_mixed, f"{name} takes tensors of both devices"
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        stays = goes or (is_remote and device is None)
        return _outer(result, args) if stays else result


def _has_masks(args: Any) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool
        for indices in args[1:2]
        if isinstance(indices, list | tuple)
        for index in indices
    )


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Remote) else value


def _outer(result: Any, args: Any) -> Any:
    """Results as tensors of the device; what was changed in place stays the tensor that it was."""
    given = {id(arg.inner): arg for arg in args if isinstance(arg, Remote)}

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else Remote(value)

    return tree_map(outer, result)
