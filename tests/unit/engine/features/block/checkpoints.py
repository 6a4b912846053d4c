"""Tiny random block drafters on disk, in every layout; written without the package's own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.unit.engine.features.checkpoints import (
    DRAFT_IDS,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    LLAMA,
    VOCAB_SIZE,
    Weights,
    layer_shapes,
    random_weights,
    vocabulary,
)

MASK_ID, SIZE, RANK = 17, 5, 6
LEFT = [layer - 1 for layer in LAYERS]
"""Ids of what leaves the layers that are read."""
QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": HEAD_DIM, "num_hidden_layers": 2}

Reach = tuple[int | None, bool]
"""Window and causality of a layer."""


@dataclass(frozen=True)
class Block:
    """A drafter: its files, and what the reference has to know of it."""

    weights: Weights
    config: Mapping[str, Any]
    stored: Weights
    """Under the names of the layout."""
    first_row: int = 1
    reaches: tuple[Reach, Reach] = ((None, False), (None, False))
    token_ids: tuple[int, ...] | None = None
    kind: str = ""
    """Of the Markov head."""

    @property
    def files(self) -> tuple[Weights, Mapping[str, Any]]:
        return self.stored, self.config


def block_weights(extra: Mapping[str, tuple[int, ...]] | None = None, *, seed: int = 3) -> Weights:
    """Two layers with norms of query and key heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in (0, 1):
        prefix = f"layers.{index}."
        shapes |= layer_shapes(HIDDEN, prefix)
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}self_attn.q_norm.weight"] = (HEAD_DIM,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (HEAD_DIM,)
    shapes |= {
        "fc.weight": (HIDDEN, len(LAYERS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    return random_weights(shapes | dict(extra or {}), seed)


def dflash(weights: Weights | None = None, *, own: Mapping[str, Any] | None = None, **changes: Any) -> Block:
    """The authors' first layout.

    Args:
        own: changes of its own section.
    """
    weights = block_weights() if weights is None else weights
    section = {"mask_token_id": MASK_ID, "target_layer_ids": LEFT, **(own or {})}
    config = {
        **QWEN,
        "architectures": ["DFlashDraftModel"],
        "block_size": SIZE,
        "num_target_layers": 3,
        "dflash_config": section,
        **changes,
    }
    return Block(weights, config, weights)


def markov_shapes(kind: str, num_logits: int = VOCAB_SIZE) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (VOCAB_SIZE, RANK),
        "markov_head.markov_w2.weight": (num_logits, RANK),
    }
    if kind == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def dspark(kind: str = "vanilla", *, judges: str = "markov", **changes: Any) -> Block:
    """DeepSpec's flat layout.

    Args:
        judges: what the confidence head reads beside hidden states: markov, hidden (nothing), or no (there is
            none).
    """
    shapes = markov_shapes(kind)
    if judges != "no":
        width = HIDDEN + RANK if judges == "markov" else HIDDEN
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    weights = block_weights(shapes)
    # A token before that matters as much as the row itself.
    weights["markov_head.markov_w1.weight"] *= 6
    config = {
        **QWEN,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": SIZE,
        "target_layer_ids": LEFT,
        "mask_token_id": MASK_ID,
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": judges != "no",
        "confidence_head_with_markov": judges == "markov",
        "num_anchors": 512,
        **changes,
    }
    return Block(weights, config, weights, first_row=0, kind=kind)


def speculators(kind: str = "", **changes: Any) -> Block:
    """The layout of speculators, with a vocabulary of its own: ids of what enters layers.

    Args:
        kind: of the Markov head; none: it is DFlash.
    """
    shapes = markov_shapes(kind, len(DRAFT_IDS)) if kind else {}
    weights = block_weights({**shapes, "lm_head.weight": (len(DRAFT_IDS), HIDDEN)})
    config = {
        "architectures": ["DSparkDraftModel" if kind else "DFlashDraftModel"],
        "speculators_model_type": "dspark" if kind else "dflash",
        "speculators_version": "0.5.0",
        "transformer_layer_config": QWEN,
        "aux_hidden_state_layer_ids": list(LAYERS),
        "block_size": SIZE,
        "mask_token_id": MASK_ID,
        "draft_vocab_size": len(DRAFT_IDS),
        **({"markov_rank": RANK, "markov_head_type": kind} if kind else {}),
        **changes,
    }
    stored = weights | vocabulary() | ({"mask_embedding": weights["norm.weight"].clone()} if kind else {})
    return Block(weights, config, stored, 0 if kind else 1, token_ids=DRAFT_IDS, kind=kind)


def renamed(block: Block, names: Mapping[str, str]) -> Block:
    """The same under other names: beginnings, and what they become."""
    stored = {}
    for name, tensor in block.stored.items():
        for start, end in names.items():
            name = end + name.removeprefix(start) if name.startswith(start) else name
        stored[name] = tensor
    return replace(block, stored=stored)


LAYOUTS: dict[str, Block] = {
    "authors": dflash(),
    "authors, all in a section": dflash(
        own={"block_size": SIZE, "projector_type": "dflash"},
        block_size=None,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": LLAMA["rope_theta"]},
    ),
    "encoder": renamed(dflash(), {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}),
    "mask of its own": dflash(block_weights({"mask_embedding": (HIDDEN,)}), own={"mask_token_id": None}),
    "embedding of its own": dflash(block_weights({"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)})),
    "windows": replace(
        dflash(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        reaches=((4, True), (None, False)),
    ),
    "windows that see ahead": replace(
        dflash(own={"use_swa": True, "swa_window_size": 3}), reaches=((3, False), (3, False))
    ),
    "windows of a target of another type": replace(
        dflash(own={"use_swa": True}, sliding_window=3, model_type="gpt_oss"),
        reaches=((3, False), (3, False)),
    ),
    "causal": replace(dflash(own={"causal": True}), reaches=((None, True), (None, True))),
    "row j for token j + 1": replace(dflash(own={"shift_label": True}), first_row=0),
    "speculators": speculators(),
    "speculators, row j for token j + 1": replace(speculators(shift_label=True), first_row=0),
    "DSpark": dspark(),
    "DSpark, gated": dspark("gated", judges="hidden"),
    "DSpark, with a state": dspark("rnn", judges="no"),
    "DSpark, windows": replace(
        dspark(judges="no", layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        reaches=((4, False), (None, False)),
    ),
    "DSpark, SpecForge": renamed(
        replace(dspark(), config=dflash(own={"projector_type": "dspark"}).config),
        {"markov_head.": "logit_head.markov_head.", "confidence_head.": "logit_head.confidence_head."},
    ),
    "DSpark, speculators": speculators("vanilla"),
    "DSpark behind the last token": replace(speculators("rnn", sample_from_anchor=False), first_row=1),
}
