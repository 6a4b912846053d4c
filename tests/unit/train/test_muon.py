"""Muon's step: that of PyTorch's own, and an iteration in the data type that is given."""

from __future__ import annotations

import torch

from specray.train.muon import Muon, orthogonal


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
