"""Light checkpoints of tiny models: a GGUF file of any types with everything else beside it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.unit.engine.model.checkpoints import write_tokenizer
from tests.unit.models.gguf_files.families import LIGHT_MODELS, MODELS, TinyModel
from tests.unit.models.gguf_files.writer import OF_VALUE_HEADS, add_value, file_tensors, original, tiled
from tests.unit.models.tiny_models import finish

FAMILIES = (
    "llama",
    "llama-llama3",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    *LIGHT_MODELS,
    "phi3",
    "phi3-longrope",
    "gemma3",
    "lfm2",
    "qwen35",
    "qwen35moe",
)
"""Models of ``families`` that the decoder runs, one of each kind."""
_ALL = MODELS | LIGHT_MODELS
Tensors = dict[str, np.ndarray]
Choose = Callable[[str], Type]
"""Type of a matrix, by its name in the file."""


@functools.cache
def _original(name: str) -> Any:
    return original(_ALL[name])


def write_light(
    directory: Path, name: str, choose: Choose, *, more: Callable[[Tensors], Tensors] = lambda tensors: {}
) -> Any:
    """Writes a model of ``families``, and returns the library's with the same numbers.

    Args:
        more: further tensors, made of the model's, in float32.
    """
    model = _original(name)
    tensors = {
        stored: (value, choose(stored) if _is_chosen(stored, value) else Type.F32)
        for stored, value in file_tensors(_ALL[name], model).items()
    }
    further = more({stored: value for stored, (value, _) in tensors.items()})
    tensors |= {stored: (value, Type.F32) for stored, value in further.items()}
    _write(directory, _ALL[name], model.config, tensors)
    return _with_numbers_of_the_file(_ALL[name], model, choose)


def _with_numbers_of_the_file(tiny: TinyModel, model: Any, choose: Choose) -> Any:
    """Blocks lie along rows, so that each row's numbers are the same wherever it is in the file."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    names = gguf.get_tensor_name_map(_ARCHITECTURES[tiny.architecture], model.config.num_hidden_layers)
    for name, parameter in copy.named_parameters():
        if parameter.ndim == 1 or name.endswith("_bias"):
            continue
        stored = names.get_name(name.removesuffix(".weight").replace("gate_up_proj", "gate_proj"))
        if tiny.architecture == "phi3":
            stored = names.get_name(name.removesuffix(".weight"))
        assert stored is not None, name
        is_transposed = tiny.architecture == "gpt-oss" and parameter.ndim == 3
        value = parameter.detach().transpose(-1, -2) if is_transposed else parameter.detach()
        if stored.endswith(_CONVOLUTIONS):
            continue
        numbers, kind = value.contiguous().numpy(), choose(f"{stored}.weight")
        if tiny.architecture.startswith("qwen35") and stored.endswith(OF_VALUE_HEADS):
            # Blocks lie along the file's order.
            places = tiled(tiny, stored, np.arange(numbers.size).reshape(numbers.shape)).reshape(-1)
            own = rounded(tiled(tiny, stored, numbers), kind).reshape(-1)
            numbers = np.empty_like(own)
            numbers[places] = own
            found = torch.from_numpy(numbers.reshape(value.shape))
        else:
            found = torch.from_numpy(rounded(numbers, kind))
        parameter.data = found.transpose(-1, -2).contiguous() if is_transposed else found
    return copy


_CONVOLUTIONS = "ssm_conv1d", "shortconv.conv"
_ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def _is_chosen(stored: str, value: np.ndarray) -> bool:
    """Whether a tensor may be of any type: the converter leaves vectors and convolutions in float32."""
    return (
        value.ndim > 1 and stored.endswith("weight") and not stored[: -len(".weight")].endswith(_CONVOLUTIONS)
    )


def rounded(value: np.ndarray, kind: Type) -> np.ndarray:
    """The numbers that a type makes of others."""
    found: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind).reshape(value.shape)
    return found


def write_random(
    directory: Path, kinds: dict[str, Type], *, hidden: int = 256, inner: int = 512, vocab: int = 64
) -> dict[str, np.ndarray]:
    """Writes a model of Qwen 2's family of blocks with random codes, and returns the file's numbers by name.

    Args:
        kinds: types of matrices by the last part of their names in the file.
    """
    tiny = MODELS["qwen2"]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    header = {"embedding_length": hidden, "feed_forward_length": inner}
    tiny = replace(tiny, config={**tiny.config, **sizes}, header={**tiny.header, **header})
    model = original(tiny)
    draw = np.random.default_rng(0)
    tensors: dict[str, tuple[np.ndarray, Type]] = {}
    numbers: dict[str, np.ndarray] = {}
    for stored, value in file_tensors(tiny, model).items():
        kind = kinds[stored.split(".")[-2]] if value.ndim > 1 else Type.F32
        if kind is not Type.F32:
            value = random_blocks(kind, value.shape, draw)
            numbers[stored] = gguf.quants.dequantize(value, kind)
        tensors[stored] = value, kind
    _write(directory, tiny, model.config, tensors)
    return numbers


def random_blocks(kind: Type, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Bytes of blocks with any codes and with small numbers as scales."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // num_values, num_bytes), dtype=np.uint8)
    places = {Type.Q6_K: (208,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q5_1: (0, 2), Type.Q4_1: (0, 2)}
    for place in places.get(kind, (0,)):
        scales = draw.uniform(1e-4, 4e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _write(
    directory: Path, tiny: TinyModel, config: Any, tensors: dict[str, tuple[np.ndarray, Type]]
) -> None:
    directory.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(directory / "model.gguf", tiny.architecture)
    for key, value in tiny.header.items():
        add_value(writer, f"{tiny.architecture}.{key}", value)
    for name, (value, kind) in tensors.items():
        if value.dtype == np.uint8:
            writer.add_tensor(name, value, raw_dtype=kind)
        elif kind in (Type.F32, Type.F16):
            numbers = np.ascontiguousarray(value, dtype=np.float32 if kind is Type.F32 else np.float16)
            writer.add_tensor(name, numbers)
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(value, dtype=np.float32), kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
    finish(writer, directory / "model.gguf")
    config.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged as a warning; other tests in the process may have let more through."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]
