"""Miniatures: an architecture at a size at which its forward can be compared with the library's in a second.

A check of the real model would need its float32 weights and sequences longer than its windows, for Llama 4
more than 8,192 tokens. What a forward over a cache can get wrong does not depend on widths or weights: it
depends on the modules, the kinds of layers and their order, and which rows a layer lets a token see. So the
miniature keeps the modules, every option, the order of the layers and the ratio of heads to kv heads; it
shrinks widths, the vocabulary, the number of experts, and windows, so that some twenty tokens lie beyond each
of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specray.errors import ConfigError

VOCAB_SIZE = 128
"""Tokens of a miniature's vocabulary."""
_HEAD_DIM = 16
_MAX_LAYERS = 24
"""Layers of a miniature, where each kind of layer comes among the first so many."""
_MAX_PARAMETERS = 100_000_000
"""Parameters of a miniature whose widths had to be kept."""
_WINDOW = re.compile(r"(window(_size|_len)?|window_size|chunk_size)$")
_NO_WINDOW = frozenset({"mamba_chunk_size", "chunk_size", "use_sliding_window"})
"""Fields with a window's name: how recurrent layers cut their work, which changes no result, and a switch."""
_FIRST_WINDOW, _WINDOW_STEP = 4, 3
_SIZES: dict[str, int] = {
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "intermediate_size_mlp": 32,
    "dense_intermediate_size": 32,
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 24,
    "ffn_dim": 32,
    "n_inner": 32,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def windows(config: PreTrainedConfig) -> dict[str, int]:
    """Every sliding window and attention chunk of a text configuration, by field, in tokens."""
    return {
        name: value
        for name, value in vars(config).items()
        if _WINDOW.search(name)
        and name not in _NO_WINDOW
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
    }


def build_miniature(config: PreTrainedConfig, *, max_model_len: int) -> PreTrainedModel:
    """A float32 model on the CPU with random weights; windows beyond ``max_model_len`` are left as they are.

    Args:
        config: of the text part.

    Raises:
        ConfigError: the library cannot build the architecture at a small size.
    """
    errors = []
    for shrunk in _candidates(config, max_model_len):
        try:
            with torch.device("meta"):
                num_parameters = AutoModelForCausalLM.from_config(copy.deepcopy(shrunk)).num_parameters()
            if num_parameters > _MAX_PARAMETERS:
                errors.append(f"{num_parameters} parameters at the least")
                continue
            model = AutoModelForCausalLM.from_config(shrunk, dtype=torch.float32).eval()
            _randomise(model)
            with torch.inference_mode():
                model(torch.arange(2, 5)[None], use_cache=False)
        except Exception as error:  # A library's constructors and forwards raise all kinds.
            errors.append(first_line(error))
        else:
            built: PreTrainedModel = model.requires_grad_(False)
            return built
    raise ConfigError(
        f"model type {config.model_type!r} is not supported: it cannot be checked at a small size ({errors[-1]})"
    )


def first_line(error: BaseException) -> str:
    """What an exception of a library says, as a part of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _candidates(config: PreTrainedConfig, max_model_len: int) -> Iterator[PreTrainedConfig]:
    """The smallest first; the last keeps the widths, for architectures that tie them in ways of their own."""
    for is_narrow in (True, False):
        shrunk = copy.deepcopy(config)
        for name in ("quantization_config", "auto_map"):
            if hasattr(shrunk, name):
                delattr(shrunk, name)
        _shrink_windows(shrunk, max_model_len)
        _shrink_vocabulary(shrunk)
        _cut_layers(shrunk, _MAX_LAYERS if is_narrow else 2)
        if is_narrow:
            _shrink_widths(shrunk)
        yield shrunk


def _shrink_windows(config: PreTrainedConfig, max_model_len: int) -> None:
    reached = {name: size for name, size in windows(config).items() if size < max_model_len}
    order = sorted(set(reached.values()))
    for name, size in reached.items():
        setattr(config, name, min(size, _FIRST_WINDOW + _WINDOW_STEP * order.index(size)))


def _shrink_vocabulary(config: PreTrainedConfig) -> None:
    config.vocab_size = min(config.vocab_size, VOCAB_SIZE)
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and value is not None:
            setattr(config, name, None if name == "pad_token_id" else 0)


def _cut_layers(config: PreTrainedConfig, most: int) -> None:
    """Leaves the first layers, with at least one of every kind that a list by layer tells apart."""
    num_layers = config.num_hidden_layers
    by_layer = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    }
    kinds = list(zip(*by_layer.values(), strict=True)) if by_layer else [()] * num_layers
    first_seen = {repr(kind): index for index, kind in reversed(list(enumerate(kinds)))}
    kept = min(num_layers, max(most, 1 + max(first_seen.values(), default=0)))
    for name, value in by_layer.items():
        setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
    if (shared := getattr(config, "num_kv_shared_layers", 0)) and kept < num_layers:
        config.num_kv_shared_layers = max(0, shared - (num_layers - kept))


def _shrink_widths(config: PreTrainedConfig) -> None:
    for name, size in _SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            setattr(config, name, [min(size, item) for item in value])
        elif isinstance(value, int) and value > 0:
            setattr(config, name, min(size, value))
    _shrink_heads(config)
    _shrink_experts(config)


def _shrink_heads(config: PreTrainedConfig) -> None:
    num_heads = config.num_attention_heads
    if not isinstance(num_heads, int):
        return
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    is_shared = num_kv_heads < num_heads
    new_kv_heads = min(num_kv_heads, 2)
    new_heads = new_kv_heads * 2 if is_shared else new_kv_heads
    head_dim = getattr(config, "head_dim", None)
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    is_square = head_dim is None or is_latent or head_dim * num_heads == config.hidden_size
    config.num_attention_heads = new_heads
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = new_kv_heads
    config.hidden_size = new_heads * _HEAD_DIM * (1 if is_square else 2)
    if head_dim is not None and not is_latent:
        config.head_dim = _HEAD_DIM
    elif head_dim is not None:
        config.head_dim = config.qk_rope_head_dim
    if getattr(config, "global_head_dim", None):
        config.global_head_dim = 2 * _HEAD_DIM
    per_layer = getattr(config, "num_attention_heads_per_layer", None)
    if isinstance(per_layer, (list, tuple)):
        most = max(per_layer)
        config.num_attention_heads_per_layer = [new_heads * 2 if n == most else new_heads for n in per_layer]
    _shorten_rope_factors(config)


def _shorten_rope_factors(config: PreTrainedConfig) -> None:
    """Factors by frequency, of which there are fewer now."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        share = values.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        for name in ("short_factor", "long_factor"):
            if name in values:
                values[name] = list(values[name])[: int(_HEAD_DIM * share) // 2]


def _shrink_experts(config: PreTrainedConfig) -> None:
    for name in _EXPERT_COUNTS:
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, 8))
    for name in _CHOSEN_EXPERTS:
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, 2))
    for name, most in (("n_group", 2), ("topk_group", 1)):
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, most))


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights with which every module matters: of the size of a trained model's, no bias zero, no norm one."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.2 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def token_ids(count: int, *, seed: int, config: Any) -> list[int]:
    """Random tokens of a miniature's vocabulary, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, int(config.vocab_size), (count,), generator=generator).tolist()
