"""Weights come from their files, in the part that is asked for, or a message says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import WeightPart, WeightSource
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import InMemoryWeights

TABLE = torch.arange(12, dtype=torch.float32).view(4, 3)
ROW = torch.tensor([1.5, -2.0])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"a.weight": TABLE, "a.bias": ROW}, tmp_path / "model.safetensors")
    return tmp_path


def open_weights(
    directory: Path, dtype: torch.dtype = torch.float32, entry: str | None = None
) -> SafetensorsWeights:
    return SafetensorsWeights("m", directory, dtype=dtype, device=torch.device("cpu"), entry=entry)


def sources(directory: Path) -> list[WeightSource]:
    return [open_weights(directory), InMemoryWeights({"a.weight": TABLE, "a.bias": ROW})]


@pytest.mark.parametrize("number", [0, 1])
def test_whole_rows_and_columns(directory: Path, number: int) -> None:
    weights = sources(directory)[number]
    assert torch.equal(weights.take("a.weight"), TABLE)
    assert torch.equal(weights.take("a.bias", WeightPart(0, 1, 2)), ROW[1:])
    assert torch.equal(weights.take("a.weight", WeightPart(0, 1, 3)), TABLE[1:3])
    columns = weights.take("a.weight", WeightPart(1, 2, 3))
    assert torch.equal(columns, TABLE[:, 2:]) and columns.is_contiguous()
    assert weights.take("a.weight", WeightPart(0, 4, 4)).shape == (0, 3)


def test_file_is_mapped_anew_after_some_bytes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken before is still there."""
    monkeypatch.setattr("specray.engine.model.checkpoint.safetensors_files.REOPEN_BYTES", 20)
    mapped: list[str] = []

    def count(file: str, **options: Any) -> Any:
        mapped.append(file)
        return safe_open(file, **options)

    monkeypatch.setattr("specray.engine.model.checkpoint.safetensors_files.safe_open", count)
    weights = open_weights(directory)
    first = weights.take("a.bias")
    assert len(mapped) == 1
    taken = [weights.take("a.weight") for _ in range(3)]
    assert len(mapped) == 3
    assert torch.equal(first, ROW) and all(torch.equal(tensor, TABLE) for tensor in taken)


def test_numbers_are_cast(directory: Path) -> None:
    taken = open_weights(directory, torch.bfloat16).take("a.weight")
    assert taken.dtype == torch.bfloat16 and torch.equal(taken, TABLE.bfloat16())


def test_several_files(directory: Path) -> None:
    save_file({"b": ROW}, directory / "second.safetensors")
    (directory / "model.safetensors").rename(directory / "first.safetensors")
    listed = {"a.weight": "first.safetensors", "a.bias": "first.safetensors", "b": "second.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    weights = open_weights(directory)
    assert weights.shapes == {"a.weight": (4, 3), "a.bias": (2,), "b": (2,)}
    assert torch.equal(weights.take("b"), ROW) and torch.equal(weights.take("a.weight"), TABLE)


def test_file_that_the_configuration_names(directory: Path) -> None:
    save_file({"b": ROW}, directory / "other.safetensors")
    assert open_weights(directory, entry="other.safetensors").shapes == {"b": (2,)}


@pytest.mark.parametrize("entry", ["../model.safetensors", "/model.safetensors"])
def test_file_outside_the_directory(directory: Path, entry: str) -> None:
    (directory / "inner").mkdir()
    with pytest.raises(ConfigError, match=f"transformers_weights is '{entry}'; allowed: a file in the model"):
        open_weights(directory / "inner", entry=entry)


def test_renamed(directory: Path) -> None:
    weights = open_weights(directory)
    weights.rename({"x": "a.bias", "y": "a.bias"})
    assert weights.shapes == {"x": (2,), "y": (2,)}
    assert torch.equal(weights.take("y"), ROW)


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_weights(directory)
    return str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    expected = f"Error no file named model.safetensors found in directory {tmp_path}."
    assert refusal(tmp_path) == f"model 'm' cannot be loaded: {expected}"


def test_truncated_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert refusal(directory).startswith("model 'm' cannot be loaded: Error while deserializing header")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"b": "gone.safetensors"}}'])
def test_index_that_leads_nowhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert refusal(tmp_path).startswith("model 'm' cannot be loaded: ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(tmp_path: Path, value: float) -> None:
    table = TABLE.clone()
    table[3, 1] = value
    save_file({"a.weight": table}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    # Another rank's rows are its own to check.
    assert torch.equal(weights.take("a.weight", WeightPart(0, 0, 3)), TABLE[:3])
    with pytest.raises(ConfigError, match=r"^model 'm': the weight 'a.weight' holds NaN or infinite values$"):
        weights.take("a.weight")


def test_number_beyond_the_data_type(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([70_000.0])}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path).take("a").item() == 70_000.0
    with pytest.raises(ConfigError, match="the weight 'a' holds NaN or infinite values"):
        open_weights(tmp_path, torch.float16).take("a")
