"""Reads the header of a GGUF file: what it holds, and whether all of it is there."""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specray.errors import ConfigError
from specray.gguf.type_sizes import FLOAT32, TYPE_SIZES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format in ``struct`` of a value, by the number of its type."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_MAX_KEPT = 4096
"""Numbers of the longest array that is kept."""

Single = str | int | float | bool


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array of which its length alone is kept: of strings, or a long one."""

    count: int


Value = Single | tuple[Single, ...] | LongArray


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    """The numbers that lie side by side come first, as in GGML."""
    type_number: int
    """Number of its data type in GGML."""
    offset: int
    """Bytes from the start of the data section."""

    @property
    def num_values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file."""

    values: dict[str, Value]
    """Values by key."""
    tensors: tuple[TensorEntry, ...]
    data_start: int
    """Bytes before the data section."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, as llama.cpp calls it."""
        return str(self.values.get("general.architecture", ""))

    @property
    def num_values(self) -> int:
        return sum(tensor.num_values for tensor in self.tensors)

    def tensor(self, name: str) -> TensorEntry | None:
        """The tensor of a name; None: there is none."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def read_header(path: Path, *, whole: Collection[str] = ()) -> GgufHeader:
    """The header without the data.

    Args:
        whole: keys whose arrays are kept whatever their length.

    Raises:
        ConfigError: the file is unreadable, no GGUF of version 2 or 3, or cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse(path, _HeaderReader(content), whole)
    except ValueError:  # mmap refuses an empty file.
        raise ConfigError(f"{path} is no GGUF file: it is empty") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def check_whole(path: Path, header: GgufHeader) -> None:
    """Raises ConfigError where a tensor's data is not in the file, as after a download that broke off."""
    size = path.stat().st_size
    for tensor in header.tensors:
        if tensor.type_number not in TYPE_SIZES:
            raise ConfigError(
                f"{path} holds the tensor {tensor.name!r} of the unknown type {tensor.type_number}"
            )
        values_per_block, block_size = TYPE_SIZES[tensor.type_number]
        end = header.data_start + tensor.offset + tensor.num_values // values_per_block * block_size
        if end > size:
            raise ConfigError(f"{path} has {size} bytes and needs at least {end}: a part of it is missing")


def read_floats(path: Path, header: GgufHeader, name: str) -> tuple[float, ...] | None:
    """The numbers of a small tensor; None: there is none. Raises ConfigError for one that is not float32."""
    tensor = header.tensor(name)
    if tensor is None:
        return None
    if tensor.type_number != FLOAT32:
        raise ConfigError(f"{path}: the tensor {name!r} is of type {tensor.type_number}; allowed: float32")
    with path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        return struct.unpack(f"<{tensor.num_values}f", file.read(4 * tensor.num_values))


@dataclass(slots=True)
class _HeaderReader:
    """A place in the file that moves on with what is read."""

    content: mmap.mmap
    position: int = 0

    def number(self, form: str) -> int:
        return int(self.scalar(form))

    def scalar(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.position)
        self.position += struct.calcsize(f"<{form}")
        result: int | float | bool = value
        return result

    def text(self) -> str:
        length = self.number("Q")
        self.skip(length)
        return self.content[self.position - length : self.position].decode("utf-8", "replace")

    def texts(self, count: int) -> Iterator[bytes]:
        """Texts, one after the other, each as bytes."""
        content, end, position = self.content, len(self.content), self.position
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(content, position)
            position += 8 + length
            if position > end:
                raise struct.error("it ends within its header")
            yield content[position - length : position]
        self.position = position

    def numbers(self, form: str, count: int) -> tuple[Single, ...]:
        start = self.position
        self.skip(count * struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self.content, start)

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.content) - self.position:
            raise struct.error("it ends within its header")
        self.position += num_bytes


def _parse(path: Path, reader: _HeaderReader, whole: Collection[str]) -> GgufHeader:
    if reader.content[: len(_MAGIC)] != _MAGIC:
        raise ConfigError(f"{path} is no GGUF file: it does not begin with GGUF")
    reader.position = len(_MAGIC)
    try:
        version = reader.number("I")
        if version not in _VERSIONS:
            raise ConfigError(f"{path} is GGUF of version {version}; allowed: 2 and 3, little endian")
        num_tensors, num_values = reader.number("Q"), reader.number("Q")
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key = reader.text()
            if key in values:
                raise _UnreadableError(f"the key {key!r} is there twice")
            values[key] = _value(reader, reader.number("I"), is_whole=key in whole)
        tensors = tuple(_tensor(reader) for _ in range(num_tensors))
    except (struct.error, _UnreadableError) as error:
        raise ConfigError(f"{path} is no readable GGUF file: {error}") from None
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path} has general.alignment {alignment!r}; allowed: a positive number")
    return GgufHeader(values, tensors, data_start=-(-reader.position // alignment) * alignment)


class _UnreadableError(Exception):
    """A header says what no header may say."""


def _value(reader: _HeaderReader, kind: int, *, is_whole: bool) -> Value:
    if kind in _FORMATS:
        return reader.scalar(_FORMATS[kind])
    if kind == _STRING:
        return reader.text()
    if kind != _ARRAY:
        raise _UnreadableError(f"a value has the unknown type {kind}")
    element, count = reader.number("I"), reader.number("Q")
    if element in _FORMATS:
        if is_whole or count <= _MAX_KEPT:
            return reader.numbers(_FORMATS[element], count)
        reader.skip(count * struct.calcsize(_FORMATS[element]))
    elif element == _STRING:
        texts = reader.texts(count)
        if is_whole:
            return tuple(text.decode("utf-8", "replace") for text in texts)
        deque(texts, maxlen=0)
    else:
        raise _UnreadableError(f"an array holds values of type {element}")
    return LongArray(count)


def _tensor(reader: _HeaderReader) -> TensorEntry:
    name = reader.text()
    num_dimensions = reader.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise _UnreadableError(f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = [reader.number("Q") for _ in range(num_dimensions)]
    return TensorEntry(name, tuple(shape), type_number=reader.number("I"), offset=reader.number("Q"))
