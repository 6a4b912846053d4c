"""Heads whose products stay in the float32 that they are summed in."""

from __future__ import annotations

import pytest
import torch

from specray.engine.model import linear as linear_module
from specray.engine.model.linear import PlainLinear, WideLinear, make_linear


@pytest.mark.parametrize(
    ("behaviour", "is_wide"),
    [
        ("wide", True),
        ("narrow", False),
        ("missing", False),
        ("unknown argument", False),
        ("writes nowhere", False),
    ],
)
def test_products_are_left_in_float32_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, is_wide: bool
) -> None:
    """On CUDA it can; what it does there is played here."""

    def mm(
        rows: torch.Tensor,
        weight: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if behaviour == "missing":
            raise NotImplementedError("not for this device")
        if behaviour == "unknown argument":
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        products = rows.float() @ weight.float()
        if behaviour == "narrow":
            products = products.to(rows.dtype).to(out_dtype)
        return products if out is None or behaviour == "writes nowhere" else out.copy_(products)

    monkeypatch.setattr(torch, "mm", mm)
    linear_module.has_wide_products.cache_clear()
    weight = torch.randn(5, 16).bfloat16()
    head = make_linear(weight, None)
    assert type(head) is (WideLinear if is_wide else PlainLinear)
    rows = torch.randn(3, 16).bfloat16()
    exact = rows.float() @ weight.float().t()
    error = (head.precise(rows) - exact).abs().max()
    assert error < 1e-5 if is_wide else 1e-5 < error < 0.1
    if isinstance(head, WideLinear):
        head.precise_into(rows, written := torch.empty(3, 5))
        assert torch.equal(written, head.precise(rows))
    assert type(make_linear(weight.float(), None)) is PlainLinear
    assert type(make_linear(weight, torch.zeros(5).bfloat16())) is PlainLinear
    linear_module.has_wide_products.cache_clear()


def test_this_cpu_has_no_wide_products() -> None:
    assert not linear_module.has_wide_products(torch.device("cpu"), torch.bfloat16)
