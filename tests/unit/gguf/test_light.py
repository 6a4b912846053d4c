"""Light checkpoints are known by their file; its numbers are the gguf library's; some work needs more."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from specray.errors import ConfigError
from specray.gguf.light import check_has_safetensors, gguf_weights
from specray.gguf.numbers import read_numbers
from tests.unit.models.tiny_models import finish


def write(path: Path, name: str, values: np.ndarray, kind: Type) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return finish(writer, path)


def test_safetensors_go_before_a_gguf_file(tmp_path: Path) -> None:
    assert gguf_weights(tmp_path) is None
    check_has_safetensors(str(tmp_path), "training")
    file = write(tmp_path / "model.gguf", "a", np.ones((2, 32), np.float32), Type.Q8_0)
    assert gguf_weights(tmp_path) == file
    with pytest.raises(ConfigError, match=f"which training does not read; allowed: .* {file} DIR"):
        check_has_safetensors(str(tmp_path), "training")
    (tmp_path / "model.safetensors").touch()
    assert gguf_weights(tmp_path) is None


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q5_1])
def test_numbers_are_those_of_the_gguf_library(kind: Type, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    file = write(tmp_path / "model.gguf", "a.weight", values, kind)
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    np.testing.assert_array_equal(read_numbers(file, "a.weight"), expected)
    with pytest.raises(ConfigError, match=r"has no tensor 'b.weight'"):
        read_numbers(file, "b.weight")
    file.write_bytes(file.read_bytes()[:-33])
    with pytest.raises(ConfigError, match=r"ends within the tensor 'a.weight'"):
        read_numbers(file, "a.weight")
