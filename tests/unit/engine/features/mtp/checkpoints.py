"""Tiny random targets with an MTP layer in their files, in every naming; it is that of a second model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from tests.unit.engine.features.reference import hidden_states
from tests.unit.engine.model.checkpoints import HIDDEN as HIDDEN_SIZES
from tests.unit.engine.model.checkpoints import (
    changing_tensors,
    reference_model,
    write_checkpoint,
    write_model,
)
from tests.unit.engine.model.zoo import FAMILIES as ZOO

NUM_LAYERS = 2
HIDDEN = 32
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Naming:
    """What a family calls an MTP layer's parts."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str
    copies: tuple[str, ...] = ()
    is_hidden_first: bool = False


DEEPSEEK = Naming(
    f"model.layers.{NUM_LAYERS}.",
    "eh_proj",
    "enorm",
    "hnorm",
    "shared_head.norm",
    ("shared_head.head", "embed_tokens"),
)
MIMO = Naming(
    "model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", (), True
)
QWEN = Naming(
    "mtp.layers.0.",
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
)

FAMILIES: dict[str, tuple[str, Naming, Mapping[str, Any]]] = {
    "DeepSeek": ("deepseek_v3", DEEPSEEK, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1}),
    "GLM": ("glm4_moe", DEEPSEEK, {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}),
    "MiMo": ("qwen2", MIMO, {}),
    "Qwen": ("qwen3", QWEN, {}),
    "Mellum": ("mellum", QWEN, {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "sparse"],
        "num_nextn_predict_layers": 1}),
    "Qwen3-Next": ("qwen3_next", QWEN, ZOO["qwen3_next"].values),
    "Qwen3.5": ("qwen3_5_text", QWEN, ZOO["qwen3_5"].values),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", QWEN, ZOO["qwen3_5_moe"].values),
}  # fmt: skip
"""Model type, naming, and fields of the target's configuration."""
HYBRIDS = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")


GLM = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}


@dataclass(frozen=True)
class Written:
    """A target with an MTP layer, and what computes it once more."""

    path: Path
    naming: Naming
    extra: Weights
    """Projection and norms of the MTP layer, by their parts."""
    donor: Path
    """A model of one layer, which is the MTP layer."""


def write_target(
    directory: Path,
    family: str,
    change: Callable[[Weights], object] = lambda weights: None,
    *,
    num_mtp_layers: int = 1,
) -> Written:
    """Writes a target.

    Args:
        change: of the files' tensors, at the end.
        num_mtp_layers: layers behind each other; further ones are others than the first.
    """
    name, naming, values = FAMILIES[family]
    if "num_nextn_predict_layers" in values:
        values = {**values, "num_nextn_predict_layers": num_mtp_layers}
    single: dict[str, Any] = {"first_k_dense_replace": 0} if "first_k_dense_replace" in values else {}
    for field in ("layer_types", "mlp_layer_types"):
        if field in values:
            single[field] = ["full_attention" if field == "layer_types" else "sparse"]
    if family == "Mellum":
        single["layer_types"] = ["sliding_attention"]
    path = _write(directory / "target", name, 0, values)
    donor = _write(directory / "donor", name, 5, {**values, "num_hidden_layers": 1, **single})
    torch.manual_seed(9)
    extra = {
        naming.projection: 0.3 * torch.randn(HIDDEN, 2 * HIDDEN),
        **{
            part: 1 + 0.3 * torch.randn(HIDDEN)
            for part in (naming.embedding_norm, naming.hidden_norm, naming.final_norm)
        },
    }
    with changing_tensors(donor) as given:
        # A final norm that a mistake would show.
        given["model.norm.weight"] = extra[naming.final_norm].clone()
    with changing_tensors(path) as weights:
        for key, tensor in given.items():
            if key.startswith("model.layers.0."):
                weights[naming.layer + key.removeprefix("model.layers.0.")] = tensor.clone()
        for part, tensor in extra.items():
            weights[named(naming, part)] = tensor.clone()
        for part in naming.copies:
            whole = "model.embed_tokens.weight" if part == "embed_tokens" else "lm_head.weight"
            weights[named(naming, part)] = weights.get(whole, weights["model.embed_tokens.weight"]).clone()
        for index in range(1, num_mtp_layers):
            further = f"model.layers.{NUM_LAYERS + index}."
            for key in [key for key in weights if key.startswith(naming.layer)]:
                is_copy = key.endswith(("head.weight", "embed_tokens.weight"))
                weight = weights[key] if is_copy else weights[key].roll(index, 0)
                weights[further + key.removeprefix(naming.layer)] = weight.clone()
        change(weights)
    return Written(path, naming, extra, donor)


def _write(directory: Path, name: str, seed: int, values: Mapping[str, Any]) -> Path:
    if name in ("deepseek_v3", "qwen2", "qwen3"):
        return write_checkpoint(directory, name, seed=seed, **values)
    own = GLM if name == "glm4_moe" else {}
    return write_model(directory, AutoConfig.for_model(name, **{**HIDDEN_SIZES, **own, **values}), seed=seed)


def named(naming: Naming, part: str) -> str:
    """The tensor's whole name."""
    return f"{part}.weight" if part.startswith("mtp.") else f"{naming.layer}{part}.weight"


@torch.inference_mode()
def drafted(
    written: Written, known: Sequence[int], count: int, *, path: Sequence[int] = ()
) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and greedy tokens behind ``known``, the last of which the target has drawn and not computed.

    The layer runs over whole sequences, without a cache.

    Args:
        path: tokens that are drawn first, whatever is likely.
    """
    model, layer, naming = reference_model(written.path), reference_model(written.donor), written.naming

    def normed(rows: torch.Tensor, part: str) -> torch.Tensor:
        norm = deepcopy(model.model.norm)
        norm.load_state_dict({"weight": written.extra[part]})
        return norm(rows)

    features = hidden_states(model, known[:-1])[NUM_LAYERS + 1]
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedded = table[torch.tensor(list(known[1:]))].clone()
    logits, tokens = [], []
    for _ in range(count):
        both = [normed(embedded, naming.embedding_norm), normed(features, naming.hidden_norm)]
        joined = torch.cat(both[::-1] if naming.is_hidden_first else both, -1)
        entering = F.linear(joined, written.extra[naming.projection])
        output = layer.model(inputs_embeds=entering[None], use_cache=False).last_hidden_state[0, -1]
        logits.append(F.linear(output, head))
        tokens.append([*path, *[int(logits[-1].argmax())] * count][len(tokens)])
        features = torch.cat((features, output[None]))
        embedded = torch.cat((embedded, table[tokens[-1]][None]))
    return logits, tokens
