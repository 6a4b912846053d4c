"""What block drafters compute, written down once more: sums over whole sequences, no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tests.unit.engine.features.block.checkpoints import MASK_ID, RANK, SIZE, Block
from tests.unit.engine.features.checkpoints import HEAD_DIM, LAYERS, NUM_HEADS, NUM_KV_HEADS
from tests.unit.engine.features.reference import hidden_states, norm, rotated


class Drafted(NamedTuple):
    """What is drawn greedily behind some tokens."""

    logits: list[torch.Tensor]
    tokens: list[int]
    chances: list[float]
    """Of the confidence head; empty without."""


def _layer(block: Block, index: int, context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    weights, prefix, (window, is_causal) = block.weights, f"layers.{index}.", block.reaches[index]
    num_before = len(context)

    def heads(kind: str, entering: torch.Tensor, count: int) -> torch.Tensor:
        found = F.linear(entering, weights[f"{prefix}self_attn.{kind}_proj.weight"])
        found = found.view(len(entering), count, HEAD_DIM)
        return found if kind == "v" else norm(found, weights[f"{prefix}self_attn.{kind}_norm.weight"])

    entering = norm(rows, weights[f"{prefix}input_layernorm.weight"])
    seen = torch.cat((context, entering))
    placed = torch.cat((torch.zeros(num_before, NUM_HEADS, HEAD_DIM), heads("q", entering, NUM_HEADS)))
    query, key = rotated(placed)[num_before:], rotated(heads("k", seen, NUM_KV_HEADS))
    value = heads("v", seen, NUM_KV_HEADS)
    hidden = torch.zeros(len(rows), len(seen))
    for row in range(len(rows)):
        for place in range(len(seen)):
            ahead = place - num_before - row
            if (is_causal and ahead > 0) or (window is not None and abs(ahead) >= window):
                hidden[row, place] = float("-inf")
    outputs = []
    for head in range(NUM_HEADS):
        own = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = query[:, head] @ key[:, own].T / HEAD_DIM**0.5
        outputs.append((scores + hidden).softmax(-1) @ value[:, own])
    rows = rows + F.linear(torch.cat(outputs, -1), weights[f"{prefix}self_attn.o_proj.weight"])
    normed = norm(rows, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return rows + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


@torch.inference_mode()
def drafted(
    model: Any, block: Block, known: Sequence[int], count: int, *, path: Sequence[int] = ()
) -> Drafted:
    """Draft tokens behind ``known``, the last of which the target has drawn and not computed.

    Args:
        path: tokens that are drawn first, whatever is likely.
    """
    weights = block.weights
    states = hidden_states(model, known[:-1])
    joined = torch.cat([states[layer] for layer in LAYERS], -1)
    context = norm(F.linear(joined, weights["fc.weight"]), weights["hidden_norm.weight"])
    table = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    mask = weights.get("mask_embedding", table[MASK_ID])
    rows = torch.stack([table[known[-1]], *[mask] * (SIZE - 1)])
    for index in (0, 1):
        rows = _layer(block, index, context, rows)
    rows = norm(rows, weights["norm.weight"])[block.first_row :]
    head = weights.get("lm_head.weight", model.get_output_embeddings().weight)
    found, before, state = Drafted([], [], []), known[-1], torch.zeros(RANK)
    for row in rows[:count]:
        logits, embedded = F.linear(row, head), torch.zeros(0)
        if block.kind:
            embedded = weights["markov_head.markov_w1.weight"][before]
            said, state = _said(block, embedded, row, state)
            logits = logits + weights["markov_head.markov_w2.weight"] @ said
        if (judge := weights.get("confidence_head.proj.weight")) is not None:
            read = torch.cat((row, embedded))[: judge.shape[1]]
            bias = weights["confidence_head.proj.bias"]
            found.chances.append(float(torch.sigmoid(judge[0] @ read + bias[0])))
        place = int(logits.argmax())
        before = place if block.token_ids is None else block.token_ids[place]
        before = [*path, *[before] * count][len(found.tokens)]
        found.logits.append(logits)
        found.tokens.append(before)
    return found


def _said(
    block: Block, embedded: torch.Tensor, row: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def joint(name: str, *read: torch.Tensor) -> torch.Tensor:
        weights = block.weights
        name = f"markov_head.{name}"
        return weights[f"{name}.weight"] @ torch.cat(read) + weights[f"{name}.bias"]

    if block.kind == "gated":
        return torch.sigmoid(joint("gate_proj", row, embedded)) * embedded, state
    if block.kind == "rnn":
        gate, proposed, said = joint("joint_proj", state, embedded, row).split(RANK)
        gate = torch.sigmoid(gate)
        return torch.tanh(said), gate * state + (1 - gate) * torch.tanh(proposed)
    return embedded, state
