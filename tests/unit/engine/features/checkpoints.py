"""Tiny random drafters on disk, in every layout that there is; written without the package's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.unit.engine.model.checkpoints import VOCAB_SIZE

HIDDEN = 32
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
INNER = 40
LAYERS = (1, 2, 3)
"""Ids in the convention of the authors, of a target with three layers: the last is before the final norm."""
DRAFT_IDS = tuple(range(3, 3 + 2 * 24, 2))
"""Token ids of the trimmed vocabulary."""

Weights = dict[str, torch.Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Matrices wide enough that argmaxes differ; norms around one, so that a forgotten one is seen."""
    torch.manual_seed(seed)
    return {
        name: 1 + 0.3 * torch.randn(shape) if name.endswith("norm.weight") else 0.3 * torch.randn(shape)
        for name, shape in shapes.items()
    }


def layer_shapes(width: int, prefix: str = "layers.0.") -> dict[str, tuple[int, ...]]:
    query, key = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def eagle3_weights(
    *, has_head: bool = True, num_logits: int = len(DRAFT_IDS), num_layers: int = 1
) -> Weights:
    """Under the names that vLLM and speculators use."""
    shapes = layer_shapes(2 * HIDDEN)
    for index in range(1, num_layers):
        shapes |= layer_shapes(HIDDEN, f"layers.{index}.")
        shapes[f"layers.{index}.input_layernorm.weight"] = (HIDDEN,)
    shapes |= {
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, len(LAYERS) * HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    if has_head:
        shapes["lm_head.weight"] = (num_logits, HIDDEN)
    return random_weights(shapes)


def eagle1_weights(*, has_bias: bool = True) -> Weights:
    shapes = {**layer_shapes(HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN)}
    return random_weights(shapes | ({"fc.bias": (HIDDEN,)} if has_bias else {}))


def medusa_weights(num_heads: int = 3, num_layers: int = 1, *, has_heads: bool = True) -> Weights:
    """Under the authors' names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{layer}.linear.bias"] = (HIDDEN,)
        if has_heads:
            shapes[f"{head}.{num_layers}.weight"] = (VOCAB_SIZE, HIDDEN)
    return random_weights(shapes)


def vocabulary(token_ids: tuple[int, ...] = DRAFT_IDS) -> Weights:
    """The map of a trimmed vocabulary, as the authors store it: offsets, and who is in it."""
    ids = torch.tensor(token_ids)
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "vocab_size": VOCAB_SIZE,
}


def masked_weights(num_layers: int = 1) -> Weights:
    """Those of EAGLE-3 with a mask's features, as P-EAGLE has them."""
    return eagle3_weights(num_layers=num_layers) | random_weights({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=8)


def medusa_files(*, has_heads: bool = True, **config: Any) -> tuple[Weights, dict[str, Any], str]:
    return medusa_weights(has_heads=has_heads), config, "medusa_lm_head.safetensors"


def official(weights: Weights, **changes: Any) -> tuple[Weights, dict[str, Any]]:
    """The authors' layout, also that of SGLang and SpecForge."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(DRAFT_IDS),
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        **changes,
    }
    return {**named, **vocabulary()}, config


def speculators(weights: Weights, **changes: Any) -> tuple[Weights, dict[str, Any]]:
    """The layout of speculators: a whole configuration inside another."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LLAMA, "head_dim": HEAD_DIM},
        "draft_vocab_size": len(DRAFT_IDS),
        "norm_before_residual": False,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        **changes,
    }
    return {**weights, **vocabulary()}, config


def nvidia(weights: Weights, **changes: Any) -> tuple[Weights, dict[str, Any]]:
    """ModelOpt's: ids of layers by what leaves them, in a section of their own."""
    named, config = official(weights, **changes)
    del config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS],
        "use_aux_hidden_state": True,
    }
    return named, config


def write(
    directory: Path, weights: Weights, config: Mapping[str, Any], name: str = "model.safetensors"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    contiguous = {key: tensor.contiguous() for key, tensor in weights.items()}
    save_file(contiguous, directory / name)
    return directory
