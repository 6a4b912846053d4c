"""Makes other models for a service under test."""

from __future__ import annotations

import shutil
from pathlib import Path

from specray.config import EngineConfig
from specray.errors import EngineLostError

NOISE = 0.02
"""Noise as a share of each weight's spread: the model differs, and most draft tokens are still accepted."""


def draft_path(draft: EngineConfig) -> Path:
    """Returns the path of the service's own draft. Raises EngineLostError if it is not on this machine."""
    from specray.engine.model.description import model_path

    path = Path(model_path(draft, "draft"))
    if not path.is_dir():
        raise EngineLostError(f"draft {path} is no directory: there is nothing to make another draft from")
    return path


def make_other_model(source: Path, destination: Path, *, seed: int = 7) -> Path:
    """Makes a model of the same shape and tokenizer with other weights, unless it exists.

    Raises:
        EngineLostError: it cannot be read or written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if destination.exists():
        return destination
    generator = torch.Generator().manual_seed(seed)
    partial = destination.with_name(f"{destination.name}.partial")
    try:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        for path in partial.glob("*.safetensors"):
            weights = load_file(path)
            for name, weight in weights.items():
                noise = torch.randn(weight.shape, generator=generator)
                weights[name] = (weight.float() + NOISE * weight.float().std() * noise).to(weight.dtype)
            save_file(weights, path, metadata={"format": "pt"})
        partial.rename(destination)
    except (OSError, SafetensorError) as error:
        raise EngineLostError(f"no other model could be made from {source}: {error}") from None
    return destination
