"""Torch's forms of linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specray.engine.activation import Activation
from specray.engine.model.linear import make_gate


def test_gelu_in_torchs_form_of_a_gate() -> None:
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(4))
    weights = _weight(24, 2), _weight(24, 3)
    expected = F.gelu(F.linear(rows, weights[0]), approximate="tanh") * F.linear(rows, weights[1])
    torch.testing.assert_close(make_gate(*weights, None, None, Activation.GELU_TANH)(rows), expected)


def _weight(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))
