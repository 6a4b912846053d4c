"""The optimizer: Muon's step, the schedule, and checkpoints of other weights, which are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specray.errors import ConfigError
from specray.train.loop import RunLimit
from specray.train.optim import MasterOptimizer, Muon, OptimizerConfig, orthogonal


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


@pytest.mark.parametrize("limit", [(None, None), (1, 1.0), (0, None), (None, -1.0)])
def test_a_run_has_exactly_one_positive_limit(limit: tuple[int | None, float | None]) -> None:
    with pytest.raises(ConfigError):
        RunLimit(*limit)


def test_the_schedule_warms_up_and_falls_to_its_final_share() -> None:
    config = OptimizerConfig(warmup_fraction=0.1, final_fraction=0.02)
    scales = [config.scale_at(progress) for progress in (0.05, 0.1, 0.55, 1.0)]
    assert scales == pytest.approx([0.5, 1.0, 0.51, 0.02])


def test_steps_are_those_of_pytorchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 8), (8, 24), (16, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    own = Muon(ours, lr=0.02, weight_decay=0.1, momentum=0.95, iterated=torch.bfloat16)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            its.grad = mine.grad.clone()
        own.step()
        reference.step()
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, its, atol=2e-4), (mine - its).abs().max()
        assert not torch.allclose(mine, torch.ones_like(mine), atol=2e-3)


def test_the_iteration_has_the_given_type_and_evens_out_singular_values() -> None:
    matrix = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
    exact = orthogonal(matrix, torch.float32)
    rough = orthogonal(matrix, torch.bfloat16)
    assert exact.dtype == rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    values = torch.linalg.svdvals(exact)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    tall = orthogonal(matrix.T, torch.float32)
    assert torch.allclose(tall.T, exact, atol=1e-5)


def test_a_matrix_without_a_gradient_stays() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    Muon([matrix], lr=0.5, weight_decay=0.5, momentum=0.9, iterated=torch.float32).step()
    assert torch.equal(matrix, torch.ones(2, 2))
