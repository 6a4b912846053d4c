"""Writes a trained draft compactly: what the target's embedding adds is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specray.train.draft.completion import COMPACT_WEIGHTS, embedding_digest
from specray.train.draft.student import Student, body_config

CARD = "training.json"
"""Name of the file that says how a draft was trained."""


def write_compact(student: Student, directory: Path, card: Mapping[str, Any]) -> None:
    """Writes the body, the two projections and the ids; what the target's embedding adds is left out.

    Args:
        card: what is to be known of the training; goes into ``training.json``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in student.body.state_dict().items()}
    tensors["embedding_projection"] = student.embedding_projection
    tensors["head_projection"] = student.head_projection
    stored = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    stored["draft_ids"] = student.draft_ids.to("cpu", torch.int32)
    save_file(stored, directory / COMPACT_WEIGHTS)
    vocab_size, width = student.target_embedding.shape
    config = body_config(student.shape, vocab_size=vocab_size).to_dict()
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "draft_vocab_size": len(student.draft_ids),
        "target_embedding": {
            "shape": [vocab_size, width],
            "sha256": embedding_digest(student.target_embedding),
        },
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / CARD, dict(card))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
