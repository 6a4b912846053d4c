"""Rows of features as bytes, and back."""

from __future__ import annotations

import math

import pytest
import torch

from specray.engine.features.remote.wire import read_rows, write_rows
from specray.errors import ProtocolError
from specray.feature_rows import FeatureRows

LIKE = torch.empty(0, dtype=torch.float32)


def sent(rows: torch.Tensor) -> FeatureRows:
    return FeatureRows(0, len(rows), write_rows(rows).tobytes())


def test_rows_come_back_as_bfloat16_has_them() -> None:
    rows = torch.tensor([[1.0, -2.5, 0.1], [0.0, 3.0e38, -1.0e-30]])
    assert torch.equal(read_rows(sent(rows), 3, like=LIKE), rows.bfloat16().float())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(ProtocolError, match=r"features\.data has infinite numbers or NaN; allowed: finite"):
        read_rows(sent(torch.tensor([[1.0, number]])), 2, like=LIKE)


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"features\.data has 4 bytes a row; allowed: 6"):
        read_rows(sent(torch.ones(2, 2)), 3, like=LIKE)
