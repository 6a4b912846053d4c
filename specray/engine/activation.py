"""The functions that a gated pair of linear layers applies to its gate."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """A function of each number."""

    SILU = "silu"
    """``x / (1 + exp(-x))``."""
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with a hyperbolic tangent."""
