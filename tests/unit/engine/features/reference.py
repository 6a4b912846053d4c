"""What drafters compute, written down once more: plain sums over whole sequences, no cache, no batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.unit.engine.features.checkpoints import (
    DRAFT_IDS,
    HEAD_DIM,
    LAYERS,
    LLAMA,
    NUM_HEADS,
    NUM_KV_HEADS,
    Weights,
)

EPS, THETA = LLAMA["rms_norm_eps"], LLAMA["rope_theta"]


@dataclass(frozen=True)
class Flags:
    """What configurations say of EAGLE-3."""

    layers: Sequence[int] = LAYERS
    is_residual_normed: bool = False
    is_output_normed: bool = False
    token_ids: Sequence[int] | None = DRAFT_IDS
    extra: Weights = field(default_factory=dict)
    windows: Sequence[int | None] = (None, None)
    """Of each layer."""


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS) * weight


@torch.inference_mode()
def hidden_states(model: Any, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """All residuals; that behind the last layer before the final norm, and one more behind it."""
    seen: list[Any] = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    states = model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    found = {layer: state[0] for layer, state in enumerate(states[:-1])}
    last = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    found[len(states) - 1] = last.view(len(token_ids), -1)
    found[len(states)] = states[-1][0]
    return found


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, head_dim]``, the first row at position 0."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(heads))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def layer(
    weights: Mapping[str, torch.Tensor],
    prefix: str,
    entering: torch.Tensor,
    residual: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention and the gated MLP, each added to the residual.

    Args:
        window: positions that a row sees, its own the last; None: all.
    """

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(rows, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    size = len(entering)
    query = rotated(product(entering, "self_attn.q_proj").view(size, NUM_HEADS, HEAD_DIM))
    key = rotated(product(entering, "self_attn.k_proj").view(size, NUM_KV_HEADS, HEAD_DIM))
    value = product(entering, "self_attn.v_proj").view(size, NUM_KV_HEADS, HEAD_DIM)
    group = NUM_HEADS // NUM_KV_HEADS
    outputs = []
    hidden = torch.zeros(size, size)
    for row in range(size):
        for place in range(size):
            if place > row or (window is not None and place + window <= row):
                hidden[row, place] = float("-inf")
    for head in range(NUM_HEADS):
        scores = query[:, head] @ key[:, head // group].T / HEAD_DIM**0.5
        outputs.append((scores + hidden).softmax(-1) @ value[:, head // group])
    rows = residual + product(torch.cat(outputs, -1), "self_attn.o_proj")
    normed = norm(rows, weights[f"{prefix}post_attention_layernorm.weight"])
    gated = F.silu(product(normed, "mlp.gate_proj")) * product(normed, "mlp.up_proj")
    return rows + product(gated, "mlp.down_proj")


@torch.inference_mode()
def eagle3(
    model: Any,
    weights: Weights,
    flags: Flags,
    token_ids: Sequence[int],
    next_token: int,
    num_steps: int,
    *,
    path: Sequence[int] = (),
) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and greedy tokens of some steps behind ``next_token``; ``path`` is drawn first."""
    states = hidden_states(model, token_ids)
    read = [states[index] for index in flags.layers]
    if "fc_norm.0.weight" in flags.extra:
        read = [norm(rows, flags.extra[f"fc_norm.{index}.weight"]) for index, rows in enumerate(read)]
    joined = torch.cat(read, -1)
    if "input_norm.weight" in flags.extra:
        joined = norm(joined, flags.extra["input_norm.weight"])
    features = F.linear(joined, weights["fc.weight"])
    table = flags.extra.get("embed_tokens.weight", model.get_input_embeddings().weight)
    embedded = table[torch.tensor([*token_ids[1:], next_token])]
    head = weights.get("lm_head.weight", model.get_output_embeddings().weight)
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    logits, tokens = [], []
    for _ in range(num_steps):
        normed = norm(features, weights["layers.0.hidden_norm.weight"])
        entering = torch.cat((norm(embedded, weights["layers.0.input_layernorm.weight"]), normed), -1)
        residual = normed if flags.is_residual_normed else features
        rows = layer(weights, "layers.0.", entering, residual, flags.windows[0])
        for index in range(1, num_layers):
            prefix = f"layers.{index}."
            entering = norm(rows, weights[f"{prefix}input_layernorm.weight"])
            rows = layer(weights, prefix, entering, rows, flags.windows[index])
        output = norm(rows[-1:], weights["norm.weight"])
        logits.append(F.linear(output, head)[0])
        place = int(logits[-1].argmax())
        best = place if flags.token_ids is None else flags.token_ids[place]
        tokens.append([*path, *[best] * num_steps][len(tokens)])
        features = torch.cat((features, output if flags.is_output_normed else rows[-1:]))
        embedded = torch.cat((embedded, table[tokens[-1]][None]))
    return logits, tokens


@torch.inference_mode()
def peagle(
    model: Any,
    weights: Weights,
    mask_id: int,
    token_ids: Sequence[int],
    next_token: int,
    num_steps: int,
    *,
    windows: Sequence[int | None] = (None, None),
) -> tuple[list[torch.Tensor], list[int]]:
    """All steps in one pass: behind the last token stand masks, whatever is drawn."""
    states = hidden_states(model, token_ids)
    joined = torch.cat([states[index] for index in LAYERS], -1)
    joined = torch.cat((joined, weights["mask_hidden"][0].expand(num_steps - 1, -1)))
    rows = F.linear(joined, weights["fc.weight"])
    table = model.get_input_embeddings().weight
    embedded = table[torch.tensor([*token_ids[1:], next_token, *[mask_id] * (num_steps - 1)])]
    normed = norm(rows, weights["layers.0.hidden_norm.weight"])
    entering = torch.cat((norm(embedded, weights["layers.0.input_layernorm.weight"]), normed), -1)
    rows = layer(weights, "layers.0.", entering, rows, windows[0])
    for index in range(1, len({name.split(".")[1] for name in weights if name.startswith("layers.")})):
        prefix = f"layers.{index}."
        entering = norm(rows, weights[f"{prefix}input_layernorm.weight"])
        rows = layer(weights, prefix, entering, rows, windows[index])
    logits = F.linear(norm(rows[-num_steps:], weights["norm.weight"]), weights["lm_head.weight"])
    return list(logits), [DRAFT_IDS[int(row.argmax())] for row in logits]


@torch.inference_mode()
def eagle1(
    model: Any, weights: Weights, token_ids: Sequence[int], next_token: int, num_steps: int
) -> tuple[list[torch.Tensor], list[int]]:
    """One layer behind ``fc``, without a norm before it or behind it."""
    features = hidden_states(model, token_ids)[model.config.num_hidden_layers + 1]
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedded = table[torch.tensor([*token_ids[1:], next_token])]
    logits, tokens = [], []
    for _ in range(num_steps):
        joined = torch.cat((embedded, features), -1)
        entering = F.linear(joined, weights["fc.weight"], weights.get("fc.bias"))
        rows = layer(weights, "layers.0.", entering, entering)
        logits.append(F.linear(rows[-1], head))
        tokens.append(int(logits[-1].argmax()))
        features = torch.cat((features, rows[-1:]))
        embedded = torch.cat((embedded, table[tokens[-1]][None]))
    return logits, tokens


@torch.inference_mode()
def medusa(
    model: Any, weights: Weights, token_ids: Sequence[int], next_token: int, num_steps: int
) -> tuple[list[torch.Tensor], list[int]]:
    """One head for each step, all from the last hidden state; ``next_token`` is unknown to them."""
    last = hidden_states(model, token_ids)[model.config.num_hidden_layers + 1][-1]
    logits = []
    for head in range(num_steps):
        rows, block = last, 0
        while (name := f"{head}.{block}.linear") + ".weight" in weights:
            rows = rows + F.silu(F.linear(rows, weights[f"{name}.weight"], weights[f"{name}.bias"]))
            block += 1
        own = weights.get(f"{head}.{block}.weight", model.get_output_embeddings().weight)
        logits.append(F.linear(rows, own))
    return logits, [int(row.argmax()) for row in logits]
