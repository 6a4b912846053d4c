"""The names that the decoder gives to the weights of files, each family's and version's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from specray.engine.model.checks.weights import PREDICTOR
from specray.engine.model.decoder_config import HEAD, DecoderConfig, layer_prefix
from specray.engine.model.layers.experts.config import DOWN, Stacked
from specray.engine.model.layers.recurrent_config import DELTA_CONVOLUTIONS, DeltaLayers

_TEXT_PARTS = ("embed_tokens", "layers", "norm")
_BASE_PREFIX = "model."
_LAYERS = re.compile(r"(.*?)layers\.\d+\.")
_HEAD = re.compile(r"(?:\w+\.)*lm_head\.weight$")
_IN_LAYERS = re.compile(r"(^|\.|\.mtp_)layers\.\d+\.")
_ALIASES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        # Nemotron-H, whose layers are one part each.
        (r"(\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(in_proj|out_proj|conv1d|norm|A_log$|D$|dt_bias$)", r".mamba.\1"),
        (r"\.mixer\.", ".mlp."),
        # OLMo Hybrid.
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        # Bamba, Falcon-H1, LFM2.
        (r"\.feed_forward\.", ".mlp."),
        (r"\.mlp\.w1\.", ".mlp.gate_proj."),
        (r"\.mlp\.w3\.", ".mlp.up_proj."),
        (r"\.mlp\.w2\.", ".mlp.down_proj."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.post_operator_norm\.", ".post_attn_norm."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        # Mixtral, MiniMax-M2, Granite.
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
        (r"\.mlp\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
        (r"\.mlp\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
        # Granite, Aria.
        (r"\.mlp\.(?:input_linear|experts\.fc1)\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.(?:output_linear|experts\.fc2)\.weight$", ".mlp.experts.down_proj"),
        (r"\.mlp\.router\.(?:gate\.|layer\.|classifier\.)?", ".mlp.gate."),
        # Qwen2-MoE, Hunyuan 3, Granite.
        (r"(?:\.mlp\.shared_expert|(?:\.mlp)?\.shared_mlp)\.", ".mlp.shared_experts."),
        (r"\.mlp\.shared_experts\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
        (r"\.mlp\.shared_experts\.output_linear\.", ".mlp.shared_experts.down_proj."),
        # ERNIE 4.5, K-EXAONE, Hunyuan 3, Kolibri 1.
        (
            r"\.(?:mlp|moe)\.(?:gate\.|router\.)?(?:moe_statics\.)?(?:e_score_correction_bias|expert_bias)$",
            ".mlp.gate.e_score_correction_bias",
        ),
        # Kimi Linear, Ling 3.
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        # Flint.
        (r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),
    )
)
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_HALVES = re.compile(
    r"(?<=layers\.)(\d+)\.(?:(self_attn|input_layernorm|post_attention_layernorm|mlp)s?\.([01])\.|(?=mlp\.))"
)
"""Parts of LongCat's layers, which are two each: numbered, but for the experts."""
_ENDS = (
    # Nemotron-H, Ling 3.
    (re.compile(r"(^|\.)(?:word_)?embeddings\.weight$"), r"\1embed_tokens.weight"),
    # Nemotron-H, Bamba, Falcon-H1, LFM2.
    (re.compile(r"(^|\.)(?:norm_f|final_layernorm|embedding_norm)\.weight$"), r"\1norm.weight"),
)
_OWN_OUTPUT_NORM = re.compile(r"\.post_(?:self_attn_layernorm|attn_norm)\.weight$")
_OUTPUT_NORMS = (
    (re.compile(r"\.post_attention_layernorm\."), ".pre_feedforward_layernorm."),
    (re.compile(r"\.post_(?:self_attn_layernorm|attn_norm)\."), ".post_attention_layernorm."),
    (re.compile(r"\.post_(?:mlp_layernorm|ffn_norm)\."), ".post_feedforward_layernorm."),
)
"""Where the norm before an MLP is called one after attention, and that has another name."""


def decoder_name(name: str) -> str:
    """The name of a weight, without a look at the others."""
    for pattern, other in _ALIASES if _IN_LAYERS.search(name) else _ENDS:
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
    own = [decoder_name(name) for name in stored]
    if not any(".mlp.experts" in name for name in own):
        # Granite calls an MLP shared where there are no experts, too.
        own = [name.replace(".mlp.shared_experts.", ".mlp.") for name in own]
    if any(".mlps." in name for name in own):
        own = [_HALVES.sub(_half, name) for name in own]
    has_output_norms = any(_OWN_OUTPUT_NORM.search(name) for name in own)
    root, found = _text_root(own), {}
    for first, name in zip(stored, own, strict=True):
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


def _half(match: re.Match[str]) -> str:
    number = 2 * int(match[1]) + int(match[3] or 0)
    return f"{number}.{match[2]}." if match[2] else f"{number}."


def _text_root(names: Iterable[str]) -> str:
    """What the names of a language model's layers begin with."""
    stored = set(names)
    layers = (_LAYERS.match(name) for name in stored if not PREDICTOR.search(name))
    counts = Counter(match[1] for match in layers if match is not None and f"{match[1]}norm.weight" in stored)
    return max(sorted(counts), key=counts.__getitem__, default=_BASE_PREFIX)


def without_identities(names: Mapping[str, str], num_experts: int) -> dict[str, str]:
    """The names without those of experts that compute nothing, for which transformers writes weights."""
    found = ((name, stored, _EXPERT.search(name)) for name, stored in names.items())
    return {name: stored for name, stored, match in found if match is None or int(match[1]) < num_experts}


def as_stored(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    """The configuration with experts stacked where the files have them so, or apart where they have not.

    Convolutions are cut where the files cut them: transformers writes three parts of one size, however many
    channels queries, keys and values have.

    Args:
        shapes: of the files' weights, by the names that :func:`decoder_names` gives them.
    """
    return _with_stored_experts(_with_stored_convolutions(config, shapes), shapes)


def _with_stored_convolutions(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    layers = config.recurrent
    if not isinstance(layers, DeltaLayers) or not layers.has_parts:
        return config
    prefix = f"{layer_prefix(layers.layers.index(True))}{layers.prefix}"
    found = [shapes.get(f"{prefix}{name}.weight", (0,))[0] for name in DELTA_CONVOLUTIONS]
    if sum(found) != layers.num_channels:
        return config
    return replace(config, recurrent=replace(layers, conv_sizes=tuple(found)))


def _with_stored_experts(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
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
