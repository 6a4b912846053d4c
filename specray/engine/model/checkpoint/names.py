"""The names that the decoder gives to the weights of files, each family's and version's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from specray.engine.model.layers.expert_config import GATE_UP, Stacked

if TYPE_CHECKING:
    from specray.engine.model.decoder_config import DecoderConfig

_BASE_PREFIX = "model."
_IN_LAYERS = re.compile(r"(^|\.)layers\.\d+\.")
_ALIASES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        # Mixtral, MiniMax-M2, Granite.
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
        (r"\.mlp\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
        (r"\.mlp\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
        # Granite, Aria.
        (r"\.mlp\.(?:input_linear|experts\.fc1)\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.(?:output_linear|experts\.fc2)\.weight$", ".mlp.experts.down_proj"),
        (r"\.mlp\.router\.(?:gate\.|layer\.)?", ".mlp.gate."),
        # Qwen2-MoE, Hunyuan 3, Granite.
        (r"(?:\.mlp\.shared_expert|(?:\.mlp)?\.shared_mlp)\.", ".mlp.shared_experts."),
        (r"\.mlp\.shared_experts\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
        (r"\.mlp\.shared_experts\.output_linear\.", ".mlp.shared_experts.down_proj."),
        # ERNIE 4.5, K-EXAONE, Hunyuan 3, Kolibri 1.
        (
            r"\.(?:mlp|moe)\.(?:gate\.|router\.)?(?:moe_statics\.)?(?:e_score_correction_bias|expert_bias)$",
            ".mlp.gate.e_score_correction_bias",
        ),
        # Flint.
        (r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),
    )
)
_OWN_OUTPUT_NORM = re.compile(r"\.post_(?:self_attn_layernorm|attn_norm)\.weight$")
_OUTPUT_NORMS = (
    (re.compile(r"\.post_attention_layernorm\."), ".pre_feedforward_layernorm."),
    (re.compile(r"\.post_(?:self_attn_layernorm|attn_norm)\."), ".post_attention_layernorm."),
    (re.compile(r"\.post_(?:mlp_layernorm|ffn_norm)\."), ".post_feedforward_layernorm."),
)
"""Where the norm before an MLP is called one after attention, and that has another name."""


def decoder_name(name: str) -> str:
    """The name of a layer's weight, without a look at the others; any other name as it is."""
    if not _IN_LAYERS.search(name):
        return name
    for pattern, other in _ALIASES:
        name = pattern.sub(other, name)
    return name


def decoder_names(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """The names of files by those of the decoder.

    Args:
        known: the decoder's own. Files of a model without its head lack the prefix of all names; others have
            it before the head.
    """
    stored, own = list(names), set(known)
    has_output_norms = any(_OWN_OUTPUT_NORM.search(name) for name in stored)
    found = {}
    for first in stored:
        name = decoder_name(first)
        for pattern, other in _OUTPUT_NORMS if has_output_norms else ():
            renamed = pattern.sub(other, name)
            if renamed != name:
                name = renamed
                break
        found[_prefixed(name, own)] = first
    return found


def _prefixed(name: str, known: set[str]) -> str:
    without = name.removeprefix(_BASE_PREFIX)
    if without != name and without in known:
        return without
    return f"{_BASE_PREFIX}{name}" if f"{_BASE_PREFIX}{name}" in known else name


def as_stored(config: DecoderConfig, names: Iterable[str]) -> DecoderConfig:
    """The configuration with experts stacked where the files have them so, or apart where they have not.

    Args:
        names: of the files' weights, as :func:`decoder_name` gives them.
    """
    experts = config.experts
    is_stacked = any(name.endswith(GATE_UP) for name in names)
    if experts is None or is_stacked == (experts.stacked is not None):
        return config
    return replace(config, experts=replace(experts, stacked=Stacked() if is_stacked else None))
