"""What decides what a model's recurrent layers compute: their sizes, and the names of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specray.engine.step import StateShape


RATES = "A"
"""Rates of decay by head, below 0, where files have them in the place of ``A_log``."""


@dataclass(frozen=True, slots=True)
class DeltaLayers:
    """Layers of the gated delta rule in the place of attention (``layers.delta``)."""

    layers: tuple[bool, ...]
    """Which layers they are."""
    num_key_heads: int
    num_heads: int
    """Heads of values, a multiple of those of keys."""
    key_dim: int
    value_dim: int
    num_taps: int
    """Inputs that an output of the convolution is made of."""
    is_joined: bool
    """Everything is in two weights, key head by key head (Qwen3-Next); False: in four (Qwen3.5)."""
    has_rates: bool = False
    """Files hold the rates of decay themselves, below 0; False: the logarithms of what is above 0."""

    prefix = "linear_attn."
    shared_field = "linear_num_key_heads"

    @property
    def num_shared(self) -> int:
        """Heads that ranks can share."""
        return self.num_key_heads

    def state_shape(self, num_ranks: int) -> StateShape:
        """What a layer keeps of a sequence, for the heads of one rank."""
        # A start looks at configurations before torch is imported.
        from specray.engine.step import StateShape

        heads, key_heads = self.num_heads // num_ranks, self.num_key_heads // num_ranks
        num_channels = 2 * key_heads * self.key_dim + heads * self.value_dim
        return StateShape(heads, key_heads, self.key_dim, self.value_dim, 1, num_channels, self.num_taps)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Every weight of a layer between its norms."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        sizes = {"qkv": 2 * keys + values, "z": values, "b": self.num_heads, "a": self.num_heads}
        if self.is_joined:
            sizes = {"qkvz": 2 * (keys + values), "ba": 2 * self.num_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"in_proj_{name}.weight": (size, hidden_size) for name, size in sizes.items()
        }
        shapes |= {
            "conv1d.weight": (2 * keys + values, 1, self.num_taps),
            RATES if self.has_rates else "A_log": (self.num_heads,),
            "dt_bias": (self.num_heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden_size, values),
        }
        return {f"{self.prefix}{name}": shape for name, shape in shapes.items()}


RecurrentLayers = DeltaLayers
"""The recurrent layers of a model, which are of one kind."""
