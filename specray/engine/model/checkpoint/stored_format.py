"""How a checkpoint's quantised weights are stored: what its configuration says, as far as it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specray.engine.model.checkpoint.layer_formats import (
    WHOLE_ROWS,
    LayerFormat,
    Rule,
    StoredFormat,
    UnreadFormatError,
    dynamic_rules,
    skipped_rules,
    target_rule,
)
from specray.engine.weights.quantization import NVFP4_GROUP
from specray.errors import ConfigError

SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a layer's tensors with the scales of its weight."""
ZERO_POINT = "weight_zero_point"
FACTOR, DIVISOR = "weight_scale_2", "weight_global_scale"
"""Names of the number of a whole weight in NVFP4: ModelOpt multiplies by it, compressed-tensors divides."""
UNUSED = frozenset(
    {"input_scale", "output_scale", "input_zero_point", "q_scale", "k_scale", "v_scale", "k_zero_point"}
    | {"v_zero_point", "input_global_scale"}
)
"""Names of tensors for activations and for the KV cache, which are not quantised here."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "scaled": ("weight",),
    "packed": ("weight_packed", "weight_shape", "weight_scale"),
    "nvfp4": ("weight_scale",),
    "gptq": ("qweight", "scales", "qzeros"),
    "awq": ("qweight", "scales", "qzeros"),
}
"""Names of the tensors that a layer of each layout must have; a scaled one has one of ``SCALES``, too, and
one in NVFP4 has its codes as ``weight`` with ``FACTOR`` or as ``weight_packed`` with ``DIVISOR``."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "scaled": (*SCALES, "weight", ZERO_POINT),
    "packed": (*NEEDED["packed"], ZERO_POINT, "weight_g_idx"),
    "nvfp4": ("weight", "weight_packed", "weight_scale", FACTOR, DIVISOR),
    "gptq": (*NEEDED["gptq"], "g_idx"),
    "awq": NEEDED["awq"],
}
"""Names of the tensors of which a layer's weight is made."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Ends of the names of both parts of a tensor in MXFP4."""
_MXFP4_BLOCKS = frozenset(f"{name}{BLOCKS_SUFFIX}" for name in ("gate_up_proj", "down_proj"))
_MXFP4_SCALES = frozenset(f"{name}{SCALES_SUFFIX}" for name in ("gate_up_proj", "down_proj"))
KNOWN_PARTS = UNUSED | _MXFP4_BLOCKS | _MXFP4_SCALES | {name for names in PARTS.values() for name in names}
"""Names of tensors that a quantised layer may have."""
_MARKS = frozenset({*SCALES, "weight_packed", "qweight"}) | _MXFP4_BLOCKS


def is_mark(name: str) -> bool:
    return name.rpartition(".")[2] in _MARKS


MXFP4 = "mxfp4"
"""Method that :mod:`mxfp4_weights` reads."""


def layer_format(path: str, stored: StoredFormat, layer: str) -> LayerFormat:
    """How a layer is stored whose tensors are quantised. Raises ConfigError where the configuration says
    otherwise."""
    try:
        return stored.of_layer(layer)
    except UnreadFormatError as error:
        raise ConfigError(
            f"model {path!r} cannot be loaded: {error}; allowed: one format for each layer"
        ) from None


def read_stored_format(method: str, values: Mapping[str, Any]) -> StoredFormat | None:
    """Format of a section about quantisation; None: method not read; UnreadFormatError: variant not read."""
    reader = READERS.get(method)
    return None if reader is None else reader(values)


def _fp8(values: Mapping[str, Any]) -> StoredFormat:
    """DeepSeek's and transformers' own: ``weight_scale_inv`` by blocks; or one scale for each weight."""
    _expect(values, "fmt", (None, "e4m3", "float8_e4m3fn"))
    _expect(values, "expert_dtype", (None, "fp8"))
    name = "modules_to_not_convert" if values.get("modules_to_not_convert") else "ignored_layers"
    skipped = skipped_rules(_names(name, values.get(name) or ()))
    layer = LayerFormat(block=_block(values, "weight_block_size"))
    return StoredFormat("fp8", (*skipped, Rule.of_all(layer)))


def _modelopt(values: Mapping[str, Any]) -> StoredFormat:
    """NVIDIA's ModelOpt: one scale for each weight or row, or NVFP4."""
    _expect(values, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"))
    _expect(values, "group_size", (None, NVFP4_GROUP))
    return StoredFormat("modelopt", (Rule.of_all(LayerFormat()),))


def _compressed(values: Mapping[str, Any]) -> StoredFormat:
    """compressed-tensors: dense numbers of 8 bits, or packed ones of 4 or 8."""
    for name in ("transform_config", "sparsity_config"):
        section = values.get(name) or {}
        if section and section.get("format") != "dense":
            raise UnreadFormatError(name)
    groups = values.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UnreadFormatError("config_groups")
    rules = [target_rule(name, None) for name in _names("ignore", values.get("ignore") or ())]
    for group in groups.values():
        layer = _group(group, group.get("format") or values.get("format"))
        rules += [
            target_rule(target, layer) for target in _names("targets", group.get("targets", ["Linear"]))
        ]
    if not groups:
        _expect(values, "format", _COMPRESSED)
        rules.append(Rule.of_all(LayerFormat()))
    return StoredFormat("compressed-tensors", tuple(rules))


_NVFP4 = "nvfp4-pack-quantized"
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", _NVFP4)


def _group(group: Mapping[str, Any], format: object) -> LayerFormat:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise UnreadFormatError("config_groups without weights")
    _expect({"format": format}, "format", _COMPRESSED)
    is_packed, strategy = format == "pack-quantized", weights.get("strategy")
    if format == _NVFP4:
        _expect(weights, "num_bits", (4,))
        _expect(weights, "type", ("float",))
        _expect(weights, "strategy", ("tensor_group",))
        _expect(weights, "group_size", (None, NVFP4_GROUP))
        return LayerFormat(bits=4, has_zero_points=False)
    _expect(weights, "num_bits", (4, 8))
    _expect(weights, "type", (None, "int") if is_packed else (None, "int", "float"))
    _expect(weights, "strategy", (None, "tensor", "channel", "group", "block"))
    size = _group_size(weights, "group_size")
    return LayerFormat(
        block=_block(weights, "block_structure") if strategy == "block" else None,
        bits=weights["num_bits"],
        group_size=WHOLE_ROWS if strategy in ("tensor", "channel") else size,
        also_needed=_also_needed(weights),
        has_zero_points=not (is_packed and weights.get("symmetric") is True),
    )


def _gptq(values: Mapping[str, Any]) -> StoredFormat:
    """GPTQ: zero points are stored less one, except in version 2 of the format."""
    _expect(values, "bits", (4, 8))
    for name in ("checkpoint_format", "format"):
        _expect(values, name, (None, "", "gptq", "gptq_v2"))
    named = {values[name] for name in ("checkpoint_format", "format") if values.get(name)}
    if len(named) > 1:
        raise UnreadFormatError(
            f"checkpoint_format {values['checkpoint_format']!r} and format {values['format']!r}"
        )
    _expect(values, "pack_dtype", (None, "int32"))
    _expect(values, "is_marlin_format", (None, False))
    for name in ("adapter", "rotation", "extra_config"):
        _expect(values, name, (None, "", {}))
    offset = 0 if named == {"gptq_v2"} else 1

    def layer(changes: Mapping[str, Any]) -> LayerFormat:
        own = {**values, **changes}
        _expect(own, "bits", (4, 8))
        return LayerFormat(
            bits=own["bits"],
            zero_offset=offset,
            group_size=_group_size(own, "group_size"),
            also_needed=frozenset({"g_idx"} if own.get("desc_act") else ()),
        )

    return StoredFormat("gptq", (*dynamic_rules(values.get("dynamic"), layer), Rule.of_all(layer({}))))


def _awq(values: Mapping[str, Any]) -> StoredFormat:
    """AWQ as AutoAWQ's ``gemm`` version stores it."""
    for name in ("version", "checkpoint_format", "format"):
        _expect({name: str(values.get(name) or "gemm").lower()}, name, ("gemm",))
    if values.get("backend") == "llm-awq":
        # All others are kernels, which read one layout.
        raise UnreadFormatError("backend 'llm-awq'")
    name = "group_size" if "group_size" in values else "q_group_size"

    def layer(changes: Mapping[str, Any]) -> LayerFormat:
        own = {**values, **changes}
        _expect({"bits": own.get("bits", own.get("w_bit"))}, "bits", (4,))
        return LayerFormat(bits=4, group_size=_group_size(own, name))

    return StoredFormat("awq", (*dynamic_rules(values.get("dynamic"), layer), Rule.of_all(layer({}))))


def _mxfp4(values: Mapping[str, Any]) -> StoredFormat:
    """gpt-oss's own: experts in MXFP4, everything else in bfloat16."""
    return StoredFormat(MXFP4, (Rule.of_all(LayerFormat()),))


READERS = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    MXFP4: _mxfp4,
}
"""Readers of a method's section, by its name."""


def _expect(values: Mapping[str, Any], name: str, allowed: tuple[object, ...]) -> None:
    value = values.get(name)
    if value is True or value not in allowed:
        raise UnreadFormatError(f"{name} {value!r}")


def _names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise UnreadFormatError(f"{name} {value!r}")
    return tuple(value)


def _also_needed(weights: Mapping[str, Any]) -> frozenset[str]:
    zero_points = () if weights.get("symmetric", True) else (ZERO_POINT,)
    order = ("weight_g_idx",) if weights.get("actorder") in ("group", "dynamic", True) else ()
    return frozenset((*zero_points, *order))


def _group_size(values: Mapping[str, Any], name: str) -> int | None:
    """Columns of a group; None: nothing is said of them."""
    size = values.get(name)
    if size is None:
        return None
    if type(size) is not int or (size < 1 and size != WHOLE_ROWS):
        raise UnreadFormatError(f"{name} {size!r}")
    return size


def _block(values: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    sizes = values.get(name)
    if sizes is None:
        return None
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != 2
        or not all(type(size) is int for size in sizes)
    ):
        raise UnreadFormatError(f"{name} {sizes!r}")
    if min(sizes) < 1:
        raise UnreadFormatError(f"{name} {sizes!r}")
    return sizes[0], sizes[1]


def check_forward(path: str, stored: StoredFormat | None, *, has_decoder: bool) -> None:
    """Raises ConfigError where quantised weights would be for forward hf."""
    if stored is not None and not has_decoder:
        raise ConfigError(
            f"model {path!r} is quantised ({stored.method!r}), which only forward decoder reads; allowed for "
            "forward hf: bfloat16, float16 or float32 weights"
        )
