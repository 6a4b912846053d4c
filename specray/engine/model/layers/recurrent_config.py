"""What decides what a model's recurrent layers compute: their sizes, and the names of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specray.engine.step import StateShape


RATES = "A"
"""Rates of decay by head, below 0, where files have them in the place of ``A_log``."""


class DeltaWeights(Enum):
    """How a layer of the gated delta rule has what it computes with."""

    JOINED = auto()
    """In two weights, key head by key head (Qwen3-Next)."""
    BY_USE = auto()
    """In four: queries, keys and values; gates; learning rates; decays (Qwen3.5)."""
    APART = auto()
    """Each of the six in one, and three convolutions (OLMo Hybrid)."""
    IN_STEPS = auto()
    """The same, but gates and decays are made in two steps, a decay for each of a key's numbers (Kimi)."""
    BY_NUMBER = auto()
    """A decay for each of a key's numbers, each of the six in one weight (Ling)."""


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
    weights: DeltaWeights
    norm_eps: float
    """Number under the root of the norm of what heads give."""
    rate_scale: float = 1.0
    """Largest rate of learning; with 2, a state may change its sign."""
    conv_sizes: tuple[int, ...] | None = None
    """Channels that each of three convolutions has in the files; None: those of queries, keys and values."""
    least_log_decay: float | None = None
    """Least logarithm of a decay, of which it is a share; None: there is none."""
    has_rates: bool = False
    """Files hold the rates of decay themselves, below 0; False: the logarithms of what is above 0."""

    @property
    def prefix(self) -> str:
        """What the names of a layer's weights begin with."""
        return "self_attn." if self.is_by_number else "linear_attn."

    @property
    def is_in_steps(self) -> bool:
        return self.weights is DeltaWeights.IN_STEPS

    @property
    def is_by_number(self) -> bool:
        """Each of a key's numbers has a decay."""
        return self.weights in (DeltaWeights.IN_STEPS, DeltaWeights.BY_NUMBER)

    @property
    def gate_dim(self) -> int:
        """Decays of a head."""
        return self.key_dim if self.is_by_number else 1

    @property
    def shared_fields(self) -> dict[str, int]:
        """Numbers that ranks share, by their names in the configuration."""
        return {"linear_num_heads" if self.is_by_number else "linear_num_key_heads": self.num_key_heads}

    def state_shape(self, num_ranks: int) -> StateShape:
        """What a layer keeps of a sequence, for the heads of one rank."""
        # A start looks at configurations before torch is imported.
        from specray.engine.step import StateShape

        heads, key_heads = self.num_heads // num_ranks, self.num_key_heads // num_ranks
        num_channels = 2 * key_heads * self.key_dim + heads * self.value_dim
        return StateShape(
            heads, key_heads, self.key_dim, self.value_dim, self.gate_dim, num_channels, self.num_taps
        )

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Every weight of a layer between its norms."""
        keys, values, heads = (
            self.num_key_heads * self.key_dim,
            self.num_heads * self.value_dim,
            self.num_heads,
        )
        inputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        inputs |= {"in_proj_b": heads, "in_proj_a": heads}
        convolved = {"conv1d": 2 * keys + values}
        if self.weights is DeltaWeights.JOINED:
            inputs = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
        elif self.has_parts:
            inputs = {"q_proj": keys, "k_proj": keys, "v_proj": values, "b_proj": heads}
            if self.is_in_steps:
                inputs |= {GATE_DOWN: self.key_dim, DECAY_DOWN: self.key_dim}
            else:
                inputs |= {"g_proj": values, self.decay_name: heads * self.gate_dim}
            convolved = dict(zip(DELTA_CONVOLUTIONS, self.conv_sizes or (keys, keys, values), strict=True))
        shapes: dict[str, tuple[int, ...]] = {
            **{f"{name}.weight": (size, hidden_size) for name, size in inputs.items()},
            **{f"{name}.weight": (size, 1, self.num_taps) for name, size in convolved.items()},
            RATES if self.has_rates else "A_log": (1, 1, heads, 1) if self.is_in_steps else (heads,),
            "dt_bias": (heads * self.gate_dim,),
            f"{self.norm_name}.weight": (self.value_dim,),
            f"{self.output_name}.weight": (hidden_size, values),
        }
        if self.is_in_steps:
            shapes[f"{GATE_UP}.weight"] = (values, self.key_dim)
            shapes[f"{DECAY_UP}.weight"] = (keys, self.key_dim)
        return {f"{self.prefix}{name}": shape for name, shape in shapes.items()}

    @property
    def num_channels(self) -> int:
        """Numbers of a row that are convolved, of all ranks."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def decay_name(self) -> str:
        """Projection to what decays are made of, in one step, where parts have their own."""
        return "f_proj" if self.is_by_number else "a_proj"

    @property
    def norm_name(self) -> str:
        return "o_norm" if self.has_parts else "norm"

    @property
    def output_name(self) -> str:
        return "o_proj" if self.has_parts else "out_proj"

    @property
    def has_parts(self) -> bool:
        """Queries, keys and values have weights and convolutions apart."""
        return self.weights in (DeltaWeights.APART, DeltaWeights.IN_STEPS, DeltaWeights.BY_NUMBER)


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of the parts of what a Mamba layer's input projection gives."""

    gate: float
    values: float
    keys: float
    queries: float
    steps: float


@dataclass(frozen=True, slots=True)
class MambaLayers:
    """Layers of Mamba 2 (``layers.mamba``)."""

    layers: tuple[bool, ...]
    """Which layers they are."""
    num_heads: int
    num_groups: int
    """Groups of heads that share keys and queries; a divisor of the heads."""
    key_dim: int
    value_dim: int
    num_taps: int
    norm_eps: float | None
    """Number under the root of the norm of what heads give; None: there is no norm."""
    field_names: tuple[str, str]
    """What the configuration calls heads and groups."""
    is_normed_first: bool = False
    """The norm is before the gate."""
    has_conv_bias: bool = True
    has_input_bias: bool = False
    has_output_bias: bool = False
    steps: tuple[float, float] = (0.0, float("inf"))
    """Least and longest step."""
    multipliers: Multipliers | None = None
    output_scale: float = 1.0
    """Factor of what the output projection gives."""

    prefix = "mamba."

    @property
    def shared_fields(self) -> dict[str, int]:
        """Numbers that ranks share, by their names in the configuration."""
        return dict(zip(self.field_names, (self.num_heads, self.num_groups), strict=True))

    def num_local_groups(self, num_ranks: int) -> int:
        """Groups of a rank's heads: with more ranks than groups, several ranks have the same one."""
        return max(1, self.num_groups // num_ranks)

    def state_shape(self, num_ranks: int) -> StateShape:
        """What a layer keeps of a sequence, for the heads of one rank."""
        from specray.engine.step import StateShape

        heads, groups = self.num_heads // num_ranks, self.num_local_groups(num_ranks)
        # Each run of heads is a piece of work, and has a copy of its group's keys in records.
        run = next(size for size in range(_MAX_RUN, 0, -1) if heads // groups % size == 0)
        num_channels = 2 * groups * self.key_dim + heads * self.value_dim
        return StateShape(heads, heads // run, self.key_dim, self.value_dim, 1, num_channels, self.num_taps)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Every weight of a layer between its norms."""
        values, keys, heads = self.num_heads * self.value_dim, self.num_groups * self.key_dim, self.num_heads
        num_channels, num_inputs = values + 2 * keys, 2 * values + 2 * keys + heads
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (num_inputs, hidden_size),
            "conv1d.weight": (num_channels, 1, self.num_taps),
            "out_proj.weight": (hidden_size, values),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        }
        if self.norm_eps is not None:
            shapes["norm.weight"] = (values,)
        for has_bias, name, size in (
            (self.has_conv_bias, "conv1d.bias", num_channels),
            (self.has_input_bias, "in_proj.bias", num_inputs),
            (self.has_output_bias, "out_proj.bias", hidden_size),
        ):
            if has_bias:
                shapes[name] = (size,)
        return {f"{self.prefix}{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class ConvolutionLayers:
    """Layers that are a short convolution alone (``layers.convolution``)."""

    layers: tuple[bool, ...]
    """Which layers they are."""
    num_channels: int
    num_taps: int
    has_bias: bool
    """The convolution and both projections have one."""

    prefix = "conv."

    @property
    def shared_fields(self) -> dict[str, int]:
        """Numbers that ranks share, by their names in the configuration."""
        return {"hidden_size": self.num_channels}

    def state_shape(self, num_ranks: int) -> StateShape:
        """What a layer keeps of a sequence, for the channels of one rank."""
        from specray.engine.step import StateShape

        return StateShape(0, 0, 0, 0, 1, self.num_channels // num_ranks, self.num_taps)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Every weight of a layer between its norms."""
        channels = self.num_channels
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (3 * channels, hidden_size),
            "conv.weight": (channels, 1, self.num_taps),
            "out_proj.weight": (hidden_size, channels),
        }
        if self.has_bias:
            shapes |= {
                "in_proj.bias": (3 * channels,),
                "conv.bias": (channels,),
                "out_proj.bias": (hidden_size,),
            }
        return {f"{self.prefix}{name}": shape for name, shape in shapes.items()}


DELTA_CONVOLUTIONS = "q_conv1d", "k_conv1d", "v_conv1d"
"""Names of convolutions that have weights apart."""
GATE_DOWN, GATE_UP = "g_a_proj", "g_b_proj"
DECAY_DOWN, DECAY_UP = "f_a_proj", "f_b_proj"
"""Both steps to gates, and both to decays."""
WIDE_WEIGHTS = "A_log", "D", "dt_bias", *(f"{name}.weight" for name in ("conv1d", *DELTA_CONVOLUTIONS))
"""Names of a layer's weights that stay in float32 where the files have them so."""
_MAX_RUN = 8
"""Heads of a group that one piece of work computes, at most."""
RecurrentLayers = DeltaLayers | MambaLayers | ConvolutionLayers
"""The recurrent layers of a model, which are of one kind."""
