"""Writes a trained head in its authors' layout, with a card that says how it was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specray.train.heads.base import Head

CARD = "README.md"
"""Name of the file that says how a head was trained."""
_MEDUSA_FILE, _FILE = "medusa_lm_head.safetensors", "model.safetensors"
"""Name of the tensors' file, of Medusa and of others."""


def write_head(head: Head, directory: Path, *, target: str, card: str, tokenizer: Any = None) -> None:
    """Writes the checkpoint; what is there is replaced only when all of it is written.

    Args:
        target: name of the target, for the configuration.
        card: text of the card.
        tokenizer: of a draft model, to be written with it; None: it is no model of its own.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: _written(tensor) for name, tensor in head.tensors().items()}
    save_file(tensors, partial / (_MEDUSA_FILE if head.name == "medusa" else _FILE), {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(head.config(target), indent=1) + "\n", "utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    (partial / CARD).write_text(card, "utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.cpu()
    return (own.to(torch.bfloat16) if own.is_floating_point() else own).contiguous()
