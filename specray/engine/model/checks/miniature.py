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
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specray.engine.model.checks.messages import plain_reason
from specray.engine.model.checks.modalities import (
    auto_class,
    drop_other_parts,
    is_text_alone,
    quiet_library,
)
from specray.errors import ConfigError

VOCAB_SIZE = 128
"""Tokens of a miniature's vocabulary."""
_HEAD_DIM = 16
_MAX_LAYERS = 8
"""Layers of a miniature, if each kind of layer is among the first of that number."""
_MAX_PARAMETERS = 30_000_000
"""Parameters of a miniature whose widths had to be kept."""
_WINDOW = re.compile(r"(window(_size|_len)?|window_size|chunk_size)$")
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
    "rotary_dim": 8,
}
_SOFT_CAP = 1.0
"""Limit of attention scores in a miniature, whose scores are too small to come near a real one."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def windows(config: PreTrainedConfig) -> dict[str, int]:
    """Every sliding window and attention chunk of a text configuration, by field, in tokens."""
    return {
        name: value
        for name, value in vars(config).items()
        if _WINDOW.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }


def build_miniature(config: PreTrainedConfig, *, max_model_len: int) -> PreTrainedModel:
    """A float32 model on the CPU with random weights; windows beyond ``max_model_len`` are left as they are.

    Args:
        config: of the whole model.

    Raises:
        ConfigError: the library cannot build the architecture at a small size.
    """
    errors: list[str] = []
    with quiet_library(), torch.random.fork_rng(devices=[]):
        for is_narrow in (True, False):
            try:
                return _build(_shrunk(config, max_model_len, is_narrow=is_narrow))
            except (
                Exception
            ) as error:  # A library's configurations, constructors and forwards raise all kinds.
                errors.append(plain_reason(error))
    reasons = errors[0] if len(set(errors)) == 1 else f"{errors[0]}; with its own widths {errors[1]}"
    raise ConfigError(
        f"model type {config.model_type!r} is not supported: it cannot be checked at a small size ({reasons})"
    )


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    from_config: Any = auto_class(config).from_config
    with torch.device("meta"):
        num_parameters = from_config(copy.deepcopy(config)).num_parameters()
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(f"it has {num_parameters} parameters, more than {_MAX_PARAMETERS}")
    model: PreTrainedModel = from_config(config, dtype=torch.float32).eval()
    _randomise(model)
    drop_other_parts(model)
    with torch.inference_mode():
        model(torch.arange(2, 5)[None], use_cache=False)
    return model.requires_grad_(False)


def _shrunk(config: PreTrainedConfig, max_model_len: int, *, is_narrow: bool) -> PreTrainedConfig:
    """A smaller copy; one that is not narrow keeps its widths, for architectures that tie them in their way.

    It is of the text part alone where the model that is loaded is.
    """
    shrunk = copy.deepcopy(config.get_text_config() if is_text_alone(config) else config)
    text = shrunk.get_text_config()
    for name in shrunk.sub_configs if text is not shrunk else ():
        other = getattr(shrunk, name, None)
        if isinstance(other, PreTrainedConfig) and other is not text:
            _shrink_other_part(other, is_narrow=is_narrow)
    _shrink_windows(text, max_model_len)
    _shrink_vocabulary(text)
    if soft_cap := _own(text, "attn_logit_softcapping"):
        text.attn_logit_softcapping = min(soft_cap, _SOFT_CAP)
    _cut_layers(text, _MAX_LAYERS if is_narrow else 2)
    if is_narrow:
        _shrink_widths(text)
    return shrunk


def _own(config: PreTrainedConfig, name: str) -> Any:
    """A field as it was set, under the name that the class gives it; None where there is none.

    Properties are computed, and of some configurations raise where layers differ.
    """
    return vars(config).get(config.attribute_map.get(name, name))


def _shrink_windows(config: PreTrainedConfig, max_model_len: int) -> None:
    reached = {name: size for name, size in windows(config).items() if size < max_model_len}
    order = sorted(set(reached.values()))
    for name, size in reached.items():
        setattr(config, name, min(size, _FIRST_WINDOW + _WINDOW_STEP * order.index(size)))


def _shrink_vocabulary(config: PreTrainedConfig) -> None:
    config.vocab_size = min(config.vocab_size, VOCAB_SIZE)
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int) and value >= config.vocab_size:
            setattr(config, name, 0)


def _shrink_other_part(config: PreTrainedConfig, *, is_narrow: bool) -> None:
    """Shrinks a part that text does not pass through, which need only be built."""
    for name in ("depth", "num_hidden_layers", "num_layers"):
        if isinstance(_own(config, name), int):
            setattr(config, name, 1)
    if _own(config, "deepstack_visual_indexes"):
        config.deepstack_visual_indexes = [0]
    if not is_narrow:
        return
    num_heads = _own(config, "num_heads") or _own(config, "num_attention_heads")
    if isinstance(num_heads, int) and isinstance(_own(config, "hidden_size"), int):
        config.hidden_size = num_heads * _HEAD_DIM
    if isinstance(num_heads, int) and isinstance(_own(config, "embed_dim"), int):
        config.embed_dim = num_heads * _HEAD_DIM
    if isinstance(_own(config, "intermediate_size"), int):
        config.intermediate_size = 32


def _cut_layers(config: PreTrainedConfig, most: int) -> None:
    """Leaves the first layers, with at least one of every kind that a list by layer tells apart.

    Of a model whose last layers take keys and values from the layers before (Gemma 3n, Gemma 4), as many of
    the last are left.
    """
    num_layers = config.num_hidden_layers
    overrides = _overrides(config)
    by_layer = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    }
    own = [overrides.get(index) for index in range(num_layers)]
    kinds = list(zip(*by_layer.values(), own, strict=True))
    shared: int = _own(config, "num_kv_shared_layers") or 0
    num_first, num_last = num_layers - shared, 0
    first_seen = {repr(kind): index for index, kind in reversed(list(enumerate(kinds[:num_first])))}
    num_first = min(num_first, max(most, 1 + max(first_seen.values(), default=0)))
    num_last = min(shared, num_first)
    kept = [*range(num_first), *range(num_layers - num_last, num_layers)]
    for name, value in by_layer.items():
        setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    if shared:
        config.num_kv_shared_layers = num_last
    _override(config, {new: overrides[old] for new, old in enumerate(kept) if old in overrides})


def _overrides(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else dict(spec.per_layer_overrides)


def _override(config: PreTrainedConfig, overrides: dict[int, dict[str, Any]]) -> None:
    if "_heterogeneity_spec" in vars(config):
        config.per_layer_config = None
        by_layer: dict[int | str, dict[str, Any]] = dict(overrides.items())
        config.per_layer_config = by_layer


def _shrink_widths(config: PreTrainedConfig) -> None:
    for name, size in _SIZES.items():
        value = _own(config, name)
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
    num_kv_heads = _own(config, "num_key_value_heads") or num_heads
    is_shared = num_kv_heads < num_heads
    new_kv_heads = min(num_kv_heads, 2)
    new_heads = new_kv_heads * 2 if is_shared else new_kv_heads
    head_dim = _own(config, "head_dim")
    is_latent = _own(config, "kv_lora_rank") is not None
    is_square = head_dim is None or is_latent or head_dim * num_heads == config.hidden_size
    config.num_attention_heads = new_heads
    if _own(config, "num_key_value_heads"):
        config.num_key_value_heads = new_kv_heads
    config.hidden_size = new_heads * _HEAD_DIM * (1 if is_square else 2)
    overrides = copy.deepcopy(_overrides(config))
    for own in overrides.values():
        for name in own.keys() & _SIZES.keys():
            own[name] = min(own[name], _SIZES[name])
        if own.get("head_dim", head_dim) != head_dim:
            own["head_dim"] = 2 * _HEAD_DIM
        if own.get("num_key_value_heads", num_kv_heads) != num_kv_heads:
            own["num_key_value_heads"] = 1 if new_kv_heads > 1 else new_heads
    if head_dim is not None and not is_latent:
        config.head_dim = _HEAD_DIM
    elif head_dim is not None:
        config.head_dim = config.qk_rope_head_dim
    _override(config, overrides)
    per_layer = _own(config, "num_attention_heads_per_layer")
    if isinstance(per_layer, (list, tuple)):
        most = max(per_layer)
        config.num_attention_heads_per_layer = [new_heads * 2 if n == most else new_heads for n in per_layer]
    _shorten_rope_factors(config)


def _shorten_rope_factors(config: PreTrainedConfig) -> None:
    rope = _own(config, "rope_parameters")
    if not isinstance(rope, dict):
        return
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        share = values.get("partial_rotary_factor") or _own(config, "partial_rotary_factor") or 1.0
        for name in ("short_factor", "long_factor"):
            if name in values:
                values[name] = list(values[name])[: int(_HEAD_DIM * share) // 2]
        if "mrope_section" in values:
            # Of frequencies by axis; for text all axes are one.
            third = int(_HEAD_DIM * share) // 6
            values["mrope_section"] = [int(_HEAD_DIM * share) // 2 - 2 * third, third, third]


def _shrink_experts(config: PreTrainedConfig) -> None:
    for name in _EXPERT_COUNTS:
        if isinstance(value := _own(config, name), int):
            setattr(config, name, min(value, 8))
    for name in _CHOSEN_EXPERTS:
        if isinstance(value := _own(config, name), int):
            setattr(config, name, min(value, 2))
    for name, most in (("n_group", 2), ("topk_group", 1)):
        if isinstance(value := _own(config, name), int):
            setattr(config, name, min(value, most))


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights with which every module matters: of a trained model's size, no bias zero, no norm one."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.2 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def token_ids(count: int, *, seed: int, config: Any) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, int(config.vocab_size), (count,), generator=generator).tolist()
