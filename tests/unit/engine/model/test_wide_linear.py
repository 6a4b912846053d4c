"""Heads whose products stay in the float32 that they are summed in."""

from __future__ import annotations

import pytest
import torch

from specray.engine.model import linear as linear_module
from specray.engine.model.linear import PlainLinear, WideLinear, make_linear


@pytest.mark.parametrize(
    ("behaviour", "is_wide"),
    [("wide", True), ("narrow", False), ("missing", False), ("unknown argument", False)],
)
def test_products_are_left_in_float32_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, is_wide: bool
) -> None:
    """On CUDA it can; what it does there is played here."""

    def mm(rows: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        if behaviour == "missing":
            raise NotImplementedError("not for this device")
        if behaviour == "unknown argument":
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        products = rows.float() @ weight.float()
        return products if behaviour == "wide" else products.to(rows.dtype).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(linear_module, "can_pack", lambda device, dtype: False)
    linear_module.has_wide_products.cache_clear()
    weight = torch.randn(5, 16).bfloat16()
    head = make_linear(weight, None)
    assert type(head) is (WideLinear if is_wide else PlainLinear)
    rows = torch.randn(3, 16).bfloat16()
    exact = rows.float() @ weight.float().t()
    error = (head.precise(rows) - exact).abs().max()
    assert error < 1e-5 if is_wide else 1e-5 < error < 0.1
    assert type(make_linear(weight.float(), None)) is PlainLinear
    assert type(make_linear(weight, torch.zeros(5).bfloat16())) is PlainLinear
    linear_module.has_wide_products.cache_clear()


def test_this_cpu_has_no_wide_products() -> None:
    assert not linear_module.has_wide_products(torch.device("cpu"), torch.bfloat16)
