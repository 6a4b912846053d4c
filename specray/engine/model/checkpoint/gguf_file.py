"""The tensors of a GGUF file, mapped into memory: blocks as they lie there, and plain numbers."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from specray.engine.weights.block_type import BlockType, numbered_type
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import HALF_BITS, GroupedWeight
from specray.engine.weights.quantization import GROUP
from specray.errors import ConfigError
from specray.gguf.header import GgufHeader, TensorEntry, check_whole, read_header

PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of plain numbers by their numbers in GGML."""
_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_RELEASED_BYTES = 1 << 24
"""Bytes read after which the pages go back to the system: pages that were read count as this process's."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as rows: of one with three dimensions, those of all matrices, one below the other."""

    shape: tuple[int, ...]
    """The numbers that lie side by side come last."""
    kind: BlockType | torch.dtype
    start: int
    """Bytes before it in the file."""

    @property
    def unit(self) -> int | None:
        """Input features that belong together where kernels hold its numbers as they are; None: none does."""
        if isinstance(self.kind, BlockType):
            return self.kind.size.num_values
        return GROUP if self.kind is torch.float16 and self.shape[-1] % GROUP == 0 else None

    @property
    def format(self) -> str:
        return self.kind.value if isinstance(self.kind, BlockType) else _NAMES[self.kind]

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        if isinstance(self.kind, BlockType):
            return self.kind.row_bytes(self.shape[-1])
        return self.shape[-1] * self.kind.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class GgufFile:
    """A GGUF file whose tensors are read row by row.

    Args:
        path: of the file.
        name: of the model, for messages.

    Raises:
        ConfigError: the file is unreadable or cut off, or holds weights of a type that is not read.
    """

    def __init__(self, path: Path, name: str) -> None:
        header = read_header(path)
        check_whole(path, header)
        self.architecture = header.architecture
        self.tensors = _tensors(header, name)
        """Tensors by name."""
        with path.open("rb") as file:
            # Writable for torch's sake; nothing writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._num_bytes = 0

    def stored(self, name: str, first: int, last: int) -> BlockWeight | GroupedWeight:
        """Rows ``first`` to ``last - 1`` of a tensor that has a unit, a view of the file."""
        tensor = self.tensors[name]
        if isinstance(tensor.kind, BlockType):
            return BlockWeight(tensor.kind, self._bytes(tensor, first, last).view(last - first, -1))
        return GroupedWeight(self.numbers(name, first, last), torch.ones(last - first, 1), bits=HALF_BITS)

    def numbers(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor of plain numbers, a view of the file."""
        tensor = self.tensors[name]
        assert isinstance(tensor.kind, torch.dtype), "asked for numbers"
        return self._bytes(tensor, first, last).view(tensor.kind).view(last - first, -1)

    def _bytes(self, tensor: GgufTensor, first: int, last: int) -> torch.Tensor:
        count = (last - first) * tensor.row_bytes
        self._num_bytes += count
        if self._num_bytes > _RELEASED_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_bytes = 0
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        start = tensor.start + first * tensor.row_bytes
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=start)


def _tensors(header: GgufHeader, name: str) -> dict[str, GgufTensor]:
    return {entry.name: _tensor(entry, header.data_start, name) for entry in header.tensors}


def _tensor(entry: TensorEntry, data_start: int, name: str) -> GgufTensor:
    kind = numbered_type(entry.type_number) or PLAIN_TYPES.get(entry.type_number)
    if kind is None:
        allowed = ", ".join([*_NAMES.values(), *BlockType])
        raise ConfigError(
            f"model {name!r}: the tensor {entry.name!r} is of type {entry.type_number}; allowed: {allowed} "
            "(`specray models convert FILE DIRECTORY` writes the file's numbers in bfloat16)"
        )
    if isinstance(kind, BlockType) and entry.shape[0] % kind.size.num_values:
        raise ConfigError(
            f"model {name!r}: the tensor {entry.name!r} of type {kind.value!r} has rows of {entry.shape[0]}; "
            f"allowed: multiples of {kind.size.num_values}"
        )
    return GgufTensor(tuple(reversed(entry.shape)), kind, data_start + entry.offset)
