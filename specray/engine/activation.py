"""The functions that join the two numbers of a gated pair of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Activation(StrEnum):
    """A function of each of the gate's numbers; what it gives is multiplied by up."""

    SILU = "silu"
    """``x / (1 + exp(-x))``."""
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with a hyperbolic tangent."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """``clamp(gate) * sigmoid(gain * clamp(gate)) * (clamp(up) + 1)``, as gpt-oss joins gate and up."""

    gain: float
    limit: float
    """Largest gate, and largest absolute up."""


Joint: TypeAlias = Activation | Clamp
"""How gate and up become one number: the activation of the gate times up, or that of gpt-oss."""


def joint_name(joint: Joint) -> str:
    """What the name of a compiled kernel says of it."""
    return joint.value if isinstance(joint, Activation) else f"clamp-{joint.gain:g}-{joint.limit:g}"
