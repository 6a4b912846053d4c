"""Recognises checkpoints whose tensors are not the model's plain weights: quantised ones, and adapters.

Read are configuration files and the headers of the safetensors files, which take milliseconds; so what cannot
be loaded is refused before the weights are, by the name of its method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specray.engine.model.checkpoint.headers import TensorHeader, read_headers, read_json
from specray.engine.model.checkpoint.layer_formats import StoredFormat, UnreadFormatError
from specray.engine.model.checkpoint.stored_format import (
    DIVISOR,
    FACTOR,
    KNOWN_PARTS,
    SCALES,
    is_mark,
    layer_format,
    read_stored_format,
)
from specray.errors import ConfigError

_METHOD_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Methods by the file next to config.json in which ModelOpt, AutoGPTQ or AutoAWQ describes what it did."""
CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json: of transformers, of compressed-tensors once, and of MLX."""
_FP8 = "F8_E4M3"
_SCALED_DTYPES = frozenset({_FP8, "I8"})
_WHOLE_DTYPES_OF = {"weight": "I8", "qweight": "I32", "qzeros": "I32", "weight_packed": "I32"}
"""Whole numbers of which these parts of a layer may be made."""
_PAIRS_DTYPE = "U8"
"""Bytes of two codes, of which they are made in NVFP4."""
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "C64", "BOOL"})
_WHOLE_DTYPES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_WEIGHT_NAME = re.compile(r"(weight|_proj|_packed|experts\.\w+)$")
_QUANTISED_NAME = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|zeros|SCB|weight_packed|weight_shape|weight_zero_point|weight_global_scale"
    r"|weight_scale|weight_scale_2|weight_scale_inv|scale_weight|scale_inv|input_scale|input_amax|weight_amax"
    r"|output_scale|activation_scale|act_scale|pre_quant_scale|k_scale|v_scale|q_scale|prob_scale)$"
    r"|\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state.*)$"
    r"|(^|\.)scaled_fp8$|_(scale_inv|qweight|qzeros|weight_scale|input_scale)$|_proj_(scales|blocks|scale)$"
)
_ADAPTER_NAME = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def check_format(path: str, directory: Path | None, config: Mapping[str, Any]) -> StoredFormat | None:
    """Finds out how a checkpoint's weights are stored.

    Args:
        path: as the user wrote it.
        directory: the checkpoint's files; None: only its configuration is here.
        config: what config.json holds.

    Returns:
        The format of quantised weights; None: they are plain.

    Raises:
        ConfigError: with one sentence, for a format that is not read, or an adapter's tensors among the
            weights.
    """
    section = _section_in_config(config)
    if section is None and directory is not None:
        section = _section_in_files(directory)
    stored = None
    if section is not None:
        try:
            stored = read_stored_format(section.method, section.values)
        except UnreadFormatError as error:
            raise _unread(path, f"{section.name}, {error}") from None
        if stored is None:
            raise _unread(path, section.name)
    if directory is not None:
        check_tensors(path, read_headers(directory), stored)
    return stored


def check_tensors(path: str, headers: Mapping[str, TensorHeader], stored: StoredFormat | None = None) -> None:
    """Raises ConfigError for an adapter's tensors, and for quantised ones that ``stored`` does not explain.

    Args:
        headers: of all tensors; none where the files are not here yet.
    """
    for name, header in headers.items():
        if _ADAPTER_NAME.search(name):
            raise ConfigError(f"model {path!r} holds the LoRA adapter's tensor {name!r}; allowed: {_MERGED}")
        if header.dtype not in _PLAIN_DTYPES | _WHOLE_DTYPES and not (stored and header.dtype == _FP8):
            raise _unread(path, f"{header.dtype} tensors such as {name!r}, without a named method")
    named = "a named method" if stored is None else f"a place in {stored.method!r}"
    for name, header in headers.items():
        is_packed = header.dtype in _WHOLE_DTYPES and len(header.shape) > 1 and _WEIGHT_NAME.search(name)
        if is_packed or _QUANTISED_NAME.search(name):
            part = name.rpartition(".")[2]
            if stored is not None and part in KNOWN_PARTS:
                allowed = _WHOLE_DTYPES_OF.get(part, header.dtype)
                if _is_nvfp4(headers, name.rpartition(".")[0]):
                    allowed = _PAIRS_DTYPE
                if header.dtype in _WHOLE_DTYPES - {allowed}:
                    raise _unread(path, f"{header.dtype} tensors such as {name!r}")
                continue
            raise _unread(path, f"{header.dtype} tensors such as {name!r}, without {named}")
    if stored is not None and headers:
        _check_stored(path, headers, stored)


def _check_stored(path: str, headers: Mapping[str, TensorHeader], stored: StoredFormat) -> None:
    """Raises ConfigError where a quantised weight has no scales, a plain one has, or none is quantised."""
    for name, header in headers.items():
        layer, _, part = name.rpartition(".")
        weight = headers.get(f"{layer}.weight")
        if _is_nvfp4(headers, layer):
            continue
        if part in SCALES and weight is not None and weight.dtype not in _SCALED_DTYPES:
            raise ConfigError(
                f"model {path!r}: {layer}.weight is {weight.dtype} and has scales; allowed: "
                f"{' or '.join(sorted(_SCALED_DTYPES))} with them, or none"
            )
        is_scaled = any(f"{layer}.{scale}" in headers for scale in SCALES)
        if part == "weight" and header.dtype in _SCALED_DTYPES and not is_scaled:
            raise ConfigError(f"model {path!r} lacks weights: {layer}.{SCALES[0]}")
    marks = [name for name in headers if is_mark(name)]
    for name in marks:
        layer_format(path, stored, name.rpartition(".")[0])
    if not marks:
        raise ConfigError(
            f"model {path!r}: its configuration says that it is quantised ({stored.method!r}), and none of "
            "its tensors is; allowed: both, or neither"
        )


def _is_nvfp4(headers: Mapping[str, TensorHeader], layer: str) -> bool:
    return any(f"{layer}.{name}" in headers for name in (FACTOR, DIVISOR))


_MERGED = "the base as target.model and the adapter's directory as target.adapter, or both merged"


def check_adapter(path: str, directory: Path) -> None:
    """Raises ConfigError where a LoRA adapter is all there is, or lies next to its base."""
    found = [name for name in _ADAPTER_FILES if (directory / name).exists()]
    if not found:
        return
    base = read_json(directory / _ADAPTER_FILES[0]).get("base_model_name_or_path")
    of_base = f" for the base model {base!r}" if isinstance(base, str) and base else ""
    raise ConfigError(
        f"model {path!r} has a LoRA adapter{of_base} ({found[0]}), which would be ignored; allowed: {_MERGED}"
    )


def _unread(path: str, method: str) -> ConfigError:
    return ConfigError(
        f"model {path!r} is quantised ({method}), and its weights cannot be read; allowed: bfloat16, float16 "
        "or float32 weights, fp8, ModelOpt FP8, NVFP4, gpt-oss's MXFP4, and compressed-tensors, GPTQ and AWQ "
        "of 4 or 8 bits"
    )


class _Section(NamedTuple):
    """A section of a configuration that says how weights are quantised."""

    method: str
    name: str
    """The method and its variant, for messages."""
    values: Mapping[str, Any]


def _section_in_config(config: Mapping[str, Any]) -> _Section | None:
    for key in CONFIG_KEYS:
        value = config.get(key)
        if isinstance(value, Mapping) and value:
            return _section(value, key)
        if value and not isinstance(value, Mapping):
            return _Section("", f"{key} {value!r}", {})
    for value in config.values():
        if isinstance(value, Mapping) and (section := _section_in_config(value)) is not None:
            return section
    return None


def _section_in_files(directory: Path) -> _Section | None:
    for name, method in _METHOD_FILES.items():
        if (directory / name).is_file():
            values = read_json(directory / name)
            inner = values.get("quantization")
            producer = values.get("producer")
            described = inner if isinstance(inner, Mapping) else values
            if isinstance(producer, Mapping) and producer.get("name"):
                described = {"quant_method": producer["name"], **described}
            return _section({"quant_method": method, **described}, name)
    return None


def _section(values: Mapping[str, Any], where: str) -> _Section:
    """The method and its variant, as far as they are named: ``'modelopt' NVFP4 in hf_quant_config.json``."""
    method = values.get("quant_method") or values.get("quant_library")
    if method is None and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        method = "bitsandbytes"
    variant = next(
        (values[key] for key in ("quant_algo", "format", "fmt", "quant_type") if values.get(key)), None
    )
    if variant is None and isinstance(bits := values.get("bits", values.get("w_bit")), int):
        variant = f"{bits} bits"
    named = "a method without a name" if method is None else repr(str(method))
    named = f"{named}{f' {variant}' if isinstance(variant, str) else ''} in {where}"
    return _Section("" if method is None else str(method), named, values)
