"""Makes the checkpoints to measure: the embedded pair's function at the cost of a real target."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from specray.demo.paths import demo_target_path
from specray.errors import ConfigError
from specray.train.inflate import InflatedShape, inflate_checkpoint
from specray.train.mixture import MixtureShape

# Additional layers make up for the embedded pair's small vocabulary; a head has 64 dimensions, as in the
# embedded target.
_SHAPE_1B: Final = InflatedShape(
    hidden_size=2048, num_layers=20, intermediate_size=8192, num_heads=32, num_kv_heads=8
)
SHAPES: Final = {
    "1b": _SHAPE_1B,
    "moe": _SHAPE_1B,
    "8b": InflatedShape(
        hidden_size=4096, num_layers=36, intermediate_size=14336, num_heads=64, num_kv_heads=16
    ),
}

MIXTURES: Final = {
    "moe": MixtureShape(num_experts=64, num_chosen=8, share=0.55, neighbours=0.3),
    "tiny-moe": MixtureShape(num_experts=6, num_chosen=2, share=0.3),
}
"""Experts beside the MLPs of a shape; ``tiny-moe`` has the embedded target's own dimensions."""


def make_checkpoint(shape: str, directory: Path, device: str) -> Path:
    """Makes the checkpoint of a shape in bfloat16 below ``directory``, unless it is there.

    Raises:
        ConfigError: there is too little disk.
    """
    if shape not in (*SHAPES, *MIXTURES):
        return demo_target_path()
    destination = directory / shape
    if (destination / "config.json").is_file():
        return destination
    sizes, mixture = SHAPES.get(shape) or InflatedShape.of(demo_target_path()), MIXTURES.get(shape)
    _check_disk(directory, sizes, mixture)
    inflate_checkpoint(
        demo_target_path(), destination, sizes, dtype="bfloat16", device=device, mixture=mixture
    )
    return destination


def num_weights(shape: InflatedShape) -> int:
    """Returns the number of weights of all layers, without the vocabulary's."""
    head_dim = 64
    attention = 2 * shape.hidden_size * head_dim * (shape.num_heads + shape.num_kv_heads)
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def _check_disk(directory: Path, shape: InflatedShape, mixture: MixtureShape | None) -> None:
    needed = 2 * num_weights(shape) * 1.05
    if mixture is not None:
        routed = mixture.share / (1 - mixture.share) * mixture.num_experts / mixture.num_chosen
        needed *= 1 + routed
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConfigError(
            f"models directory {directory} has {free / 1e9:.1f} GB free; needed: {needed / 1e9:.1f} GB"
        )
