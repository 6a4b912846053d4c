"""Headers of GGUF files: what is read, and which files are refused before a converter starts."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.gguf.header import LongArray, check_whole, read_header
from specray.models.conversion import check_convertible
from tests.unit.models.tiny_models import LAYERS, TOKENS, tensor_values, write_gguf


def test_values_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "tiny.gguf"))
    values = tensor_values()
    assert header.architecture == "llama"
    assert header.values["llama.block_count"] == LAYERS
    assert header.values["tokenizer.ggml.tokens"] == LongArray(len(TOKENS))
    assert header.values["tokenizer.ggml.token_type"] == (3, 3, *[1] * (len(TOKENS) - 2))
    assert {tensor.name: tensor.shape for tensor in header.tensors} == {
        name: value.shape[::-1] for name, value in values.items()
    }
    assert header.num_values == sum(value.size for value in values.values())
    check_whole(tmp_path / "tiny.gguf", header)


def test_a_file_that_lacks_its_last_byte_is_not_whole(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    header = read_header(path)
    last = max(header.tensors, key=lambda tensor: tensor.offset)
    end = header.data_start + last.offset + last.num_values * 4
    path.write_bytes(path.read_bytes()[:end])
    check_whole(path, header)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"has {end - 1} bytes and needs at least {end}"):
        check_whole(path, header)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 no GGUF", "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; allowed: 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little endian"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "no readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "no readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "it ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "a value has the unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1),
            "an array holds values of type 9",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "it ends within its header"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sII", 1, b"k", 4, 7),
            "the key 'k' is there twice",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "has 9 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=part) as refused:
        read_header(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values={"split.count": 3})
    with pytest.raises(ConfigError, match="is one of 3 parts of a model"):
        check_convertible(path, read_header(path))


def test_a_file_without_tensors_holds_no_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors={})
    with pytest.raises(ConfigError, match="holds no model"):
        check_convertible(path, read_header(path))
