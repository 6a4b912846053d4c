"""Makes the checkpoints to measure: the embedded pair's function at the cost of a real target."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from specray.demo.paths import demo_target_path
from specray.errors import ConfigError
from specray.train.inflate import InflatedShape, inflate_checkpoint

# Additional layers make up for the embedded pair's small vocabulary; a head has 64 dimensions, as in the
# embedded target.
SHAPES: Final = {
    "1b": InflatedShape(
        hidden_size=2048, num_layers=20, intermediate_size=8192, num_heads=32, num_kv_heads=8
    ),
    "8b": InflatedShape(
        hidden_size=4096, num_layers=36, intermediate_size=14336, num_heads=64, num_kv_heads=16
    ),
}


def make_checkpoint(shape: str, directory: Path, device: str) -> Path:
    """Makes the checkpoint of a shape in bfloat16 below ``directory``, unless it is there.

    Raises:
        ConfigError: there is too little disk.
    """
    if shape not in SHAPES:
        return demo_target_path()
    destination = directory / shape
    if (destination / "config.json").is_file():
        return destination
    sizes = SHAPES[shape]
    _check_disk(directory, sizes)
    inflate_checkpoint(demo_target_path(), destination, sizes, dtype="bfloat16", device=device)
    return destination


def num_weights(shape: InflatedShape) -> int:
    """Returns the number of weights of all layers, without the vocabulary's."""
    head_dim = 64
    attention = 2 * shape.hidden_size * head_dim * (shape.num_heads + shape.num_kv_heads)
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def _check_disk(directory: Path, shape: InflatedShape) -> None:
    needed = 2 * num_weights(shape) * 1.05
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConfigError(
            f"models directory {directory} has {free / 1e9:.1f} GB free; needed: {needed / 1e9:.1f} GB"
        )
