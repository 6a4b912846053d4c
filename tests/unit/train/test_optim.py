"""Checkpoints of an optimizer: none of other weights is taken over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specray.errors import ConfigError
from specray.train.optim import MasterOptimizer, OptimizerConfig


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, size) for size in sizes))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        # One number would fill both.
        ((1,), r"has '0.weight' as \[1, 2\], and this one as \[2, 2\]"),
        ((2, 2), r"has '1.weight' as \[2, 2\], and this one as None"),
        ((), r"has '0.weight' as None, and this one as \[2, 2\]"),
    ],
)
def test_a_run_of_other_weights_does_not_go_on(sizes: tuple[int, ...], problem: str) -> None:
    model = layers(2)
    before = [parameter.clone() for parameter in model.parameters()]
    other = {name: parameter.detach() for name, parameter in layers(*sizes).named_parameters()}
    optimizer = MasterOptimizer(model, OptimizerConfig())
    with pytest.raises(ConfigError, match=f"{problem}; allowed: the options that it began with"):
        optimizer.load_state_dict({**optimizer.state_dict(), "masters": other})
    assert all(map(torch.equal, model.parameters(), before))
