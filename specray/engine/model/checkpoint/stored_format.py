"""How a checkpoint's quantised weights are stored: what its configuration says, as far as it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A format of quantised weights that :mod:`stored_weights` reads."""

    method: str
    """Name of the method: a key of ``READERS``."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale of ``weight_scale`` or ``weight_scale_inv``; None: whole rows, the
    whole weight, or groups along the columns, as the scales' shape says."""
    bits: int = 8
    """Bits of a number in ``qweight``."""
    zero_offset: int = 0
    """What is added to the zero points of ``qzeros``."""
    group_size: int | None = None
    """Columns of a group, the last of which may have fewer; None: as the scales' shape says."""
    also_needed: frozenset[str] = frozenset()
    """Further tensors that every quantised layer must have, since the configuration speaks of them."""


SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a layer's tensors with the scales of its weight."""
UNUSED = frozenset(
    {"input_scale", "output_scale", "input_zero_point", "q_scale", "k_scale", "v_scale", "k_zero_point"}
    | {"v_zero_point"}
)
"""Names of tensors for activations and for the KV cache, which are not quantised here."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "scaled": ("weight",),
    "packed": ("weight_packed", "weight_shape", "weight_scale"),
    "gptq": ("qweight", "scales", "qzeros"),
    "awq": ("qweight", "scales", "qzeros"),
}
"""Names of the tensors that a layer of each layout must have; a scaled one has one of ``SCALES``, too."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "scaled": (*SCALES, "weight", "weight_zero_point"),
    "packed": (*NEEDED["packed"], "weight_zero_point", "weight_g_idx"),
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
    """Whether a tensor tells a quantised layer from a plain one."""
    return name.rpartition(".")[2] in _MARKS


MXFP4 = "mxfp4"
"""Method that :mod:`mxfp4_weights` reads."""


class UnreadFormatError(Exception):
    """The method's variant is none that is read; the text names it."""


def read_stored_format(method: str, values: Mapping[str, Any]) -> StoredFormat | None:
    """What a section about quantisation describes.

    Args:
        method: its ``quant_method`` or producer.
        values: the section.

    Returns:
        None: no method that is read.

    Raises:
        UnreadFormatError: the method is one that is read, but not in this variant.
    """
    reader = READERS.get(method)
    return None if reader is None else reader(values)


def _fp8(values: Mapping[str, Any]) -> StoredFormat:
    """DeepSeek's and transformers' own: ``weight_scale_inv`` by blocks; or one scale for each weight."""
    _expect(values, "fmt", (None, "e4m3", "float8_e4m3fn"))
    return StoredFormat("fp8", block=_block(values, "weight_block_size"))


def _modelopt(values: Mapping[str, Any]) -> StoredFormat:
    """NVIDIA's ModelOpt: one scale for each weight or row."""
    _expect(values, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
    return StoredFormat("modelopt")


def _compressed(values: Mapping[str, Any]) -> StoredFormat:
    """compressed-tensors: dense numbers of 8 bits, or packed ones of 4 or 8."""
    _expect(values, "format", ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"))
    for name in ("transform_config", "sparsity_config"):
        section = values.get(name) or {}
        if section and section.get("format") != "dense":
            raise UnreadFormatError(name)
    groups = values.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UnreadFormatError("config_groups")
    blocks, sizes, needed = set(), set(), []
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise UnreadFormatError("config_groups without weights")
        _expect(weights, "num_bits", (4, 8))
        _expect(weights, "strategy", (None, "tensor", "channel", "group", "block"))
        sizes.add(weights.get("group_size"))
        needed.append(_also_needed(weights))
        if weights.get("strategy") == "block":
            blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise UnreadFormatError("blocks of several sizes")
    return StoredFormat(
        "compressed-tensors",
        block=next(iter(blocks), None),
        group_size=_group_size(sizes.pop()) if len(sizes) == 1 else None,
        also_needed=frozenset.intersection(*needed) if needed else frozenset(),
    )


def _gptq(values: Mapping[str, Any]) -> StoredFormat:
    """GPTQ: zero points are stored less one, except in version 2 of the format."""
    _expect(values, "bits", (4, 8))
    _expect(values, "checkpoint_format", (None, "", "gptq", "gptq_v2"))
    offset = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
    size = _group_size(values.get("group_size"))
    needed = frozenset({"g_idx"} if values.get("desc_act") else ())
    return StoredFormat("gptq", bits=values["bits"], zero_offset=offset, group_size=size, also_needed=needed)


def _awq(values: Mapping[str, Any]) -> StoredFormat:
    """AWQ as AutoAWQ's ``gemm`` version stores it."""
    _expect({"bits": values.get("bits", values.get("w_bit"))}, "bits", (4,))
    _expect({"version": str(values.get("version") or "gemm").lower()}, "version", ("gemm",))
    return StoredFormat(
        "awq", bits=4, group_size=_group_size(values.get("group_size", values.get("q_group_size")))
    )


def _mxfp4(values: Mapping[str, Any]) -> StoredFormat:
    """gpt-oss's own: experts in MXFP4, everything else in bfloat16."""
    return StoredFormat(MXFP4)


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
    if isinstance(value, bool) or value not in allowed:
        raise UnreadFormatError(f"{name} {value!r}")


def _also_needed(weights: Mapping[str, Any]) -> frozenset[str]:
    """What layers of compressed-tensors have with zero points, or with groups in an order of their own."""
    zero_points = () if weights.get("symmetric", True) else ("weight_zero_point",)
    order = ("weight_g_idx",) if weights.get("actorder") in ("group", "dynamic", True) else ()
    return frozenset((*zero_points, *order))


def _group_size(size: object) -> int | None:
    """Columns of a group; -1 in a configuration is a whole row."""
    return size if type(size) is int and size > 0 else None


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
