"""What decides what a layer of experts computes: how they are chosen, what they are, and what is beside them.

It is read without torch. Names are those that the decoder gives a layer's weights, whatever a file calls them
(see ``checkpoint.names``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from specray.engine.activation import Clamp

ROUTER = "mlp.gate"
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
SHARED = "mlp.shared_experts"
SHARED_GATE = "mlp.shared_expert_gate"
LATENT_DOWN, LATENT_UP = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"


class Score(Enum):
    """What a router's products become."""

    SOFTMAX = auto()
    SIGMOID = auto()


@dataclass(frozen=True, slots=True)
class Groups:
    """Runs of experts, as many in each, of which some are left before experts are chosen."""

    number: int
    num_kept: int
    num_summed: int
    """Best experts of a group whose scores add up to the group's."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts and weighs them, in the order of the fields."""

    num_chosen: int
    """Experts that compute a token."""
    has_bias: bool = False
    """The products have a bias."""
    is_wide: bool = False
    """Products are those of float32 numbers; else of numbers in the model's data type."""
    score: Score = Score.SOFTMAX
    chooses_by_product: bool = False
    """Products choose, and the score is that of the chosen ones alone; else scores choose."""
    choice_bias: tuple[int, ...] | None = None
    """Shape of the numbers that are added for the choice and do not weigh; None: there are none."""
    groups: Groups | None = None
    is_normed: bool = False
    """The weights of the chosen ones are made to add up to one."""
    epsilon: float = 0.0
    """Added to the sum that they are divided by."""
    floor: float = 0.0
    """Least sum that they are divided by."""
    scale: float = 1.0
    """Factor of the weights."""
    is_rounded: bool = False
    """Weights are rounded to the model's data type."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One tensor holds a weight of all experts, gate and up together."""

    is_transposed: bool = False
    """It is ``[num_experts, in_features, out_features]``; else out_features come first."""
    is_in_turn: bool = False
    """The outputs of gate and up lie in turn; else those of up after those of the gate."""


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """An MLP beside the chosen ones that computes every token."""

    intermediate_size: int
    has_gate: bool = False
    """What it gives is multiplied by the sigmoid of one product of the input."""
    is_joined: bool = False
    """Gate and up are one weight of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Several MLPs in the place of one, of which a router chooses some for each token."""

    num_experts: int
    intermediate_size: int
    layers: tuple[bool, ...]
    """Which layers have them; the others have one MLP."""
    routing: Routing
    stacked: Stacked | None = None
    """How they lie where they are stacked; None: each has weights of its own."""
    has_bias: bool = False
    """The layers of each have biases."""
    clamp: Clamp | None = None
    """How gate and up are joined where that is not the model's activation; None: it is."""
    shared: SharedMlp | None = None
    num_identities: int = 0
    """Further experts, behind the others, that give back what they read and have no weights."""
    is_shortcut: bool = False
    """They are beside a layer's MLP, and what they give is added behind the next layer."""
    latent_size: int | None = None
    """Numbers of a row that experts read and give, made of the hidden state; None: they read that."""

    @property
    def num_routed(self) -> int:
        """Experts among which a router chooses."""
        return self.num_experts + self.num_identities

    def wide_weights(self) -> tuple[str, ...]:
        """Names of a layer's weights that stay in float32 where the files have them so."""
        names = (f"{ROUTER}.weight", f"{ROUTER}.bias") if self.routing.is_wide else ()
        return (*names, CHOICE_BIAS)

    def weight_shapes(
        self, hidden_size: int, *, has_mlp_bias: bool, is_gated: bool = True
    ) -> dict[str, tuple[int, ...]]:
        """The weights of a layer, by name.

        Args:
            has_mlp_bias: the MLPs that compute every token have biases, and what is around a latent.
            is_gated: each MLP joins two linear layers; else it has no ``gate_proj``.
        """
        shapes: dict[str, tuple[int, ...]] = {f"{ROUTER}.weight": (self.num_routed, hidden_size)}
        if self.routing.has_bias:
            shapes[f"{ROUTER}.bias"] = (self.num_routed,)
        if self.routing.choice_bias is not None:
            shapes[CHOICE_BIAS] = self.routing.choice_bias
        size = self.latent_size or hidden_size
        shapes |= self._apart(size) if self.stacked is None else self._together(self.stacked, size)
        if self.latent_size is not None:
            latent = {LATENT_DOWN: (size, hidden_size), LATENT_UP: (hidden_size, size)}
            shapes |= _with_biases(latent, has_bias=has_mlp_bias)
        if self.shared is not None:
            shapes |= self._shared(self.shared, hidden_size, has_mlp_bias)
        return shapes if is_gated else {name: shapes[name] for name in shapes if ".gate_proj" not in name}

    def _apart(self, hidden: int) -> dict[str, tuple[int, ...]]:
        linears: dict[str, tuple[int, int]] = {}
        for number in range(self.num_experts):
            linears |= _gated(expert_prefix(number), self.intermediate_size, hidden)
        return _with_biases(linears, has_bias=self.has_bias)

    def _together(self, stacked: Stacked, hidden: int) -> dict[str, tuple[int, ...]]:
        count, inner = self.num_experts, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            GATE_UP: (count, 2 * inner, hidden),
            DOWN: (count, hidden, inner),
        }
        if stacked.is_transposed:
            shapes = {name: (count, columns, rows) for name, (_, rows, columns) in shapes.items()}
        if self.has_bias:
            shapes |= {f"{GATE_UP}_bias": (count, 2 * inner), f"{DOWN}_bias": (count, hidden)}
        return shapes

    def _shared(self, shared: SharedMlp, hidden: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
        linears = _gated(f"{SHARED}.", shared.intermediate_size, hidden)
        if shared.is_joined:
            linears = {
                f"{SHARED}.gate_up_proj": (2 * shared.intermediate_size, hidden),
                f"{SHARED}.down_proj": (hidden, shared.intermediate_size),
            }
        shapes = _with_biases(linears, has_bias=has_bias)
        return shapes | ({f"{SHARED_GATE}.weight": (1, hidden)} if shared.has_gate else {})


def expert_prefix(number: int) -> str:
    """What the names of an expert's own weights begin with."""
    return f"mlp.experts.{number}."


def _gated(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}gate_proj": (inner, hidden),
        f"{prefix}up_proj": (inner, hidden),
        f"{prefix}down_proj": (hidden, inner),
    }


def _with_biases(linears: dict[str, tuple[int, int]], *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    return shapes | ({f"{name}.bias": shape[:1] for name, shape in linears.items()} if has_bias else {})
