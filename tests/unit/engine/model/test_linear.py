"""Linear layers through oneDNN: exact at every width, of which oneDNN sees few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specray.engine.activation import Activation
from specray.engine.model import linear as module
from specray.engine.model.linear import (
    PackedGate,
    PackedLinear,
    PlainGate,
    can_pack,
    make_gate,
    make_linear,
    padded_width,
)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN"
)


def test_a_width_is_padded_by_a_quarter_at_most_and_not_at_all_up_to_eight() -> None:
    assert [padded_width(num_rows) for num_rows in range(9)] == list(range(9))
    assert [padded_width(num_rows) for num_rows in (9, 11, 16, 17, 33, 100, 128, 129, 257)] == [
        10, 12, 16, 20, 40, 112, 128, 160, 320,
    ]  # fmt: skip
    for num_rows in range(9, 2000):
        assert num_rows <= padded_width(num_rows) <= 1.25 * num_rows


def test_onednn_sees_four_widths_per_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: dict[str, set[int]] = {"unary": set(), "binary": set()}
    unary, binary = module.pointwise, module.pointwise_binary

    def seen_unary(rows: torch.Tensor, *rest: Any) -> Any:
        widths["unary"].add(len(rows))
        return unary(rows, *rest)

    def seen_binary(rows: torch.Tensor, *rest: Any) -> Any:
        widths["binary"].add(len(rows))
        return binary(rows, *rest)

    monkeypatch.setattr(module, "pointwise", seen_unary)
    monkeypatch.setattr(module, "pointwise_binary", seen_binary)
    linear, gate = _linear(), _gate()
    for num_rows in range(1, 257):
        rows = torch.zeros(num_rows, 16)
        linear(rows)
        linear.plus(rows, torch.zeros(num_rows, 24))
        gate(rows)
    # 1 to 8, and four in each of (8, 16], (16, 32], (32, 64], (64, 128], (128, 256].
    assert {len(widths["unary"]), len(widths["binary"])} == {8 + 5 * 4}


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 13, 16, 17, 100])
def test_padded_rows_change_nothing(num_rows: int) -> None:
    rows = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(num_rows))
    summand = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(1))
    linear, gate = _linear(), _gate()
    weight, bias = _weight(24, 0), _weight(24, 1)[:, 0]
    expected = F.linear(rows, weight, bias)
    torch.testing.assert_close(linear(rows), expected)
    torch.testing.assert_close(linear.precise(rows), expected)
    torch.testing.assert_close(linear.plus(rows, summand.clone()), expected + summand)
    gated = F.silu(F.linear(rows, _weight(24, 2))) * F.linear(rows, _weight(24, 3))
    torch.testing.assert_close(gate(rows), gated)


def test_gelu_in_every_form_of_a_gate() -> None:
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(4))
    weights = _weight(24, 2), _weight(24, 3)
    expected = F.gelu(F.linear(rows, weights[0]), approximate="tanh") * F.linear(rows, weights[1])
    packed = make_gate(*weights, None, None, Activation.GELU_TANH)
    assert isinstance(packed, PackedGate)
    for gate in (packed, PlainGate(torch.cat(weights), None, Activation.GELU_TANH)):
        torch.testing.assert_close(gate(rows), expected)


def _weight(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))


def _linear() -> PackedLinear:
    linear = make_linear(_weight(24, 0), _weight(24, 1)[:, 0].contiguous())
    assert isinstance(linear, PackedLinear)
    return linear


def _gate() -> PackedGate:
    gate = make_gate(_weight(24, 2), _weight(24, 3), None, None)
    assert isinstance(gate, PackedGate)
    return gate
