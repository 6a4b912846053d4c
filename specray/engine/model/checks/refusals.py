"""Names in plain words what is known of a configuration that cannot be served, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specray.engine.model.checks.messages import first_line
from specray.engine.model.checks.miniature import windows

_RECURRENT_KINDS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid_mamba", "gdn"}
)
_MLP_KINDS = frozenset({"mlp", "moe", "dense", "sparse"})
_COMPUTED = "the gated delta rule, Kimi delta attention, Mamba 2 and short convolutions"
"""Kinds of recurrent layers that the decoder has."""
_OTHER_RECURRENT = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), "Mamba 1"),
    "minimax": "lightning attention",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
}
"""Model types with recurrent layers of other kinds, and these kinds."""
_LEAST_WINDOW = 2
"""Tokens of the smallest window that the library's cache keeps."""
_SPARSE_FIELDS = ("index_topk", "index_n_heads", "index_topk_blocks")
_SPARSE_KINDS = frozenset(
    {"indexed_attention", "heavily_compressed_attention", "compressed_sparse_attention"}
)


def layer_kinds(config: Any) -> frozenset[str]:
    """What a text configuration calls its layers; none where it does not list them."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)):
            return frozenset(map(str, kinds))
    return frozenset()


def has_recurrent_layers(config: Any) -> bool:
    """Whether some layers of a text configuration keep a state, which cannot be cut as keys can."""
    if layer_kinds(config) & _RECURRENT_KINDS or config.model_type in {"mamba2", *_OTHER_RECURRENT}:
        return True
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # Of configurations that leave out what the library looks for, each in its own way.
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def known_refusal(config: Any, *, max_model_len: int) -> str | None:
    """Why a text configuration cannot be served, as the end of a sentence; None: nothing is known.

    Args:
        max_model_len: the most tokens of a sequence; windows and chunks beyond it are never reached.
    """
    kinds = layer_kinds(config)
    if (kind := _OTHER_RECURRENT.get(config.model_type)) is not None:
        return f"it has recurrent layers of {kind}; allowed: {_COMPUTED}"
    if config.model_type == "zamba2":
        return (
            "its recurrent layers read what a transformer that several of them share makes of their input "
            "and of the embeddings, which nothing here computes"
        )
    if config.model_type == "mamba2" or (
        kinds & _RECURRENT_KINDS and not kinds - _RECURRENT_KINDS - _MLP_KINDS
    ):
        return "it has recurrent layers alone; allowed: recurrent layers besides attention"
    missing = _missing(config, kinds)
    if missing:
        return f"it has {' and '.join(missing)}"
    if not getattr(config, "is_causal", True):
        return "its tokens see those after them (is_causal is false)"
    first = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and first is not None and first <= max_model_len:
        # The library counts rows, which are of several sequences here.
        return (
            f"it scales the queries of tokens from {first} on and max_model_len is {max_model_len}; "
            f"allowed: max_model_len up to {first - 1}"
        )
    if "chunked_attention" in kinds:
        chunk = windows(config).get("attention_chunk_size")
        if chunk is not None and chunk < max_model_len:
            return (
                f"its attention is cut into chunks of {chunk} tokens and max_model_len is {max_model_len}; "
                f"allowed: max_model_len up to {chunk}"
            )
    return None


def _missing(config: Any, kinds: frozenset[str]) -> list[str]:
    """What a model that cannot be served for its attention has, and nothing here computes."""
    is_sparse = kinds & _SPARSE_KINDS or any(getattr(config, name, None) for name in _SPARSE_FIELDS)
    if not is_sparse:
        return []
    found = ["sparse attention, whose layers choose the tokens that they see by an index of their own"]
    if getattr(config, "hc_count", None):
        found.append("several residual streams (hyper-connections)")
    return [*found, "embeddings of n-grams"] if getattr(config, "ngram_size", None) else found


def window_refusal(config: Any, windows: Sequence[int | None], *, max_model_len: int) -> str | None:
    """Says why a model is refused whose cache in the library keeps fewer tokens than a layer attends to.

    It goes by the configuration's windows, which a model's own code may not know: what the library generates
    then is not what its forward says.

    Args:
        windows: tokens that each layer attends to; None: all.
    """
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # Of windows that are not set, each in its own way.
        return f"transformers makes no cache for it ({first_line(error)})"
    for index, (layer, window) in enumerate(zip(layers, windows, strict=False)):
        if window is not None and window < _LEAST_WINDOW:
            return (
                f"layer {index} has a window of {window} tokens, of which transformers' cache keeps others; "
                f"allowed: {_LEAST_WINDOW} or more"
            )
        kept = getattr(layer, "sliding_window", None)
        if kept is not None and kept < min(window or max_model_len, max_model_len):
            return (
                f"its configuration names a window of {kept} tokens for layer {index}, which attends to "
                f"{window or 'all'}; allowed: max_model_len up to {kept}"
            )
    return None


def refusal_of(config: Any, *, max_model_len: int) -> str | None:
    reason = known_refusal(config, max_model_len=max_model_len)
    return None if reason is None else f"model type {config.model_type!r} is not supported: {reason}"
