"""Recognises checkpoints whose tensors are not the model's plain weights: quantised ones, and adapters.

Read are configuration files and the headers of the safetensors files, which take milliseconds; so such a
checkpoint is refused before its weights are loaded, by the name of its method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specray.engine.model.checkpoint.headers import TensorHeader, read_headers, read_json
from specray.errors import ConfigError

_METHOD_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside config.json in which ModelOpt, AutoGPTQ and AutoAWQ describe what they did."""
_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json: of transformers, of compressed-tensors once, and of MLX."""
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


def check_format(path: str, directory: Path | None, config: Mapping[str, Any]) -> None:
    """Raises ConfigError, with one sentence, for a quantised checkpoint or one with a LoRA adapter.

    Args:
        path: as the user wrote it.
        directory: the checkpoint's files; None: only its configuration is here.
        config: what config.json holds.
    """
    if directory is not None:
        check_adapter(path, directory)
    method = _method_in_config(config)
    if method is None and directory is not None:
        method = _method_in_files(directory)
    if method is not None:
        raise _quantised(path, method)
    if directory is not None:
        check_tensors(path, read_headers(directory))


def check_tensors(path: str, headers: Mapping[str, TensorHeader]) -> None:
    """Raises ConfigError when names or data types show that tensors are quantised, or an adapter's."""
    for name, header in headers.items():
        if _ADAPTER_NAME.search(name):
            raise ConfigError(f"model {path!r} holds the LoRA adapter's tensor {name!r}; allowed: {_MERGED}")
        if header.dtype not in _PLAIN_DTYPES | _WHOLE_DTYPES:
            raise _quantised(path, f"{header.dtype} tensors such as {name!r}, without a named method")
    for name, header in headers.items():
        is_packed = header.dtype in _WHOLE_DTYPES and len(header.shape) > 1 and _WEIGHT_NAME.search(name)
        if is_packed or _QUANTISED_NAME.search(name):
            raise _quantised(path, f"{header.dtype} tensors such as {name!r}, without a named method")


_MERGED = "a model into which its adapter is merged, without adapter files"


def check_adapter(path: str, directory: Path) -> None:
    """Raises ConfigError where a LoRA adapter is all there is, or lies beside its base."""
    found = [name for name in _ADAPTER_FILES if (directory / name).exists()]
    if not found:
        return
    base = read_json(directory / _ADAPTER_FILES[0]).get("base_model_name_or_path")
    of_base = f" for the base model {base!r}" if isinstance(base, str) and base else ""
    raise ConfigError(
        f"model {path!r} has a LoRA adapter{of_base} ({found[0]}), which would be ignored; allowed: {_MERGED}"
    )


def _quantised(path: str, method: str) -> ConfigError:
    return ConfigError(
        f"model {path!r} is quantised ({method}), and its weights cannot be read; "
        "allowed: bfloat16, float16 or float32 weights"
    )


def _method_in_config(config: Mapping[str, Any]) -> str | None:
    """Looks into the parts of a multimodal configuration as well."""
    for key in _CONFIG_KEYS:
        value = config.get(key)
        if isinstance(value, Mapping) and value:
            return _method_name(value, key)
        if value and not isinstance(value, Mapping):
            return f"{key} {value!r}"
    for value in config.values():
        if isinstance(value, Mapping) and (method := _method_in_config(value)) is not None:
            return method
    return None


def _method_in_files(directory: Path) -> str | None:
    for name in _METHOD_FILES:
        if (directory / name).is_file():
            values = read_json(directory / name)
            inner = values.get("quantization")
            producer = values.get("producer")
            described = inner if isinstance(inner, Mapping) else values
            if isinstance(producer, Mapping) and producer.get("name"):
                described = {"quant_method": producer["name"], **described}
            return _method_name(described, name)
    return None


def _method_name(values: Mapping[str, Any], where: str) -> str:
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
    return f"{named}{f' {variant}' if isinstance(variant, str) else ''} in {where}"
