"""The names that the decoder gives to the weights of files, each family's and version's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from specray.engine.model.checks.weights import PREDICTOR
from specray.engine.model.decoder_config import HEAD, DecoderConfig, layer_prefix
from specray.engine.model.layers.expert_config import DOWN, Stacked

_TEXT_PARTS = ("embed_tokens", "layers", "norm")
_BASE_PREFIX = "model."
_LAYERS = re.compile(r"(.*?)layers\.\d+\.")
_HEAD = re.compile(r"(?:\w+\.)*lm_head\.weight$")
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


def decoder_names(names: Iterable[str], *, text_alone: bool = False) -> dict[str, str]:
    """The names of files by those of the decoder.

    All of a language model's names begin alike, whatever it is a part of: as those of most layers do that
    have a final norm beside them. Files of a model without its head may lack that.

    Args:
        text_alone: leave out what is of no language model, such as the parts of a multimodal one.
    """
    stored = list(names)
    has_output_norms = any(_OWN_OUTPUT_NORM.search(name) for name in stored)
    root, found = _text_root(stored), {}
    for first in stored:
        name = decoder_name(first)
        for pattern, other in _OUTPUT_NORMS if has_output_norms else ():
            renamed = pattern.sub(other, name)
            if renamed != name:
                name = renamed
                break
        if PREDICTOR.search(name):
            found[name] = first
        elif _HEAD.match(name) is not None and not _IN_LAYERS.search(name):
            found[HEAD] = first
        elif name.startswith(tuple(f"{root}{part}." for part in _TEXT_PARTS)):
            found[f"{_BASE_PREFIX}{name.removeprefix(root)}"] = first
        elif not text_alone:
            found[name] = first
    return found


def _text_root(names: Iterable[str]) -> str:
    """What the names of a language model's layers begin with."""
    stored = set(names)
    layers = (_LAYERS.match(name) for name in stored if not PREDICTOR.search(name))
    counts = Counter(match[1] for match in layers if match is not None and f"{match[1]}norm.weight" in stored)
    return max(sorted(counts), key=counts.__getitem__, default=_BASE_PREFIX)


def as_stored(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    """The configuration with experts stacked where the files have them so, or apart where they have not.

    Args:
        shapes: of the files' weights, by the names that :func:`decoder_names` gives them.
    """
    experts = config.experts
    layers = tuple(map(layer_prefix, range(config.num_hidden_layers)))
    joined = [shapes[name] for name in shapes if name.endswith(DOWN) and name.startswith(layers)]
    if experts is None or bool(joined) == (experts.stacked is not None):
        return config
    stacked = None
    if joined:
        # Qwen3-VL's files have them turned, whatever the configuration says.
        size = experts.intermediate_size
        stacked = Stacked(size != config.hidden_size and joined[0][1:] == (size, config.hidden_size))
    return replace(config, experts=replace(experts, stacked=stacked))
