"""Rows of features as tensors, and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specray.errors import ProtocolError
from specray.feature_rows import ITEM_BYTES, FeatureRows


def read_rows(rows: FeatureRows, feature_size: int, *, like: torch.Tensor) -> torch.Tensor:
    """The rows, ``[num_rows, feature_size]``, on the device and in the data type of another tensor.

    Raises:
        ProtocolError: they are of another size, or not finite: what is computed from such numbers would
            stay in the cache and reach other sequences.
    """
    if rows.row_bytes != ITEM_BYTES * feature_size:
        raise ProtocolError(
            f"features.data has {rows.row_bytes} bytes a row; allowed: {ITEM_BYTES * feature_size}"
        )
    # A copy that may be written, as torch wants it.
    numbers = torch.frombuffer(bytearray(rows.data), dtype=torch.bfloat16)
    if not bool(numbers.isfinite().all()):
        raise ProtocolError("features.data has infinite numbers or NaN; allowed: finite bfloat16 numbers")
    return numbers.view(rows.num_rows, feature_size).to(device=like.device, dtype=like.dtype)


def write_rows(rows: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = rows.to(torch.bfloat16).contiguous().cpu().view(torch.uint8).numpy()
    return found
