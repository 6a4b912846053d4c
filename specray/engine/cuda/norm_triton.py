"""RMS norm with a program for each row, as a Triton kernel. Importing it needs triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(
    rows, weight, summand, out, eps, row_stride, summand_stride,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, HAS_SUMMAND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_SIZE)
    is_place = place < SIZE
    numbers = tl.load(rows + row * row_stride + place, mask=is_place, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    normed = numbers * factor * tl.load(weight + place, mask=is_place, other=0.0).to(tl.float32)
    if HAS_SUMMAND:
        # Rounded as a norm is before something is added to it.
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
        normed += tl.load(summand + row * summand_stride + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + place, normed.to(out.dtype.element_ty), mask=is_place)


@dataclass(frozen=True, slots=True)
class RowNorm:
    """Implements ``decoder.Norm``: the bits of a row depend on nothing but the row."""

    weight: torch.Tensor  # [size], float32 or the rows' type
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._normed(rows, None)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._normed(rows, summand)

    def _normed(self, rows: torch.Tensor, summand: torch.Tensor | None) -> torch.Tensor:
        num_rows, size = rows.shape
        out = torch.empty(num_rows, size, dtype=rows.dtype, device=rows.device)
        if num_rows:
            added = rows if summand is None else summand
            _norm[(num_rows,)](
                rows, self.weight, added, out, self.eps, rows.stride(0), added.stride(0),
                SIZE=size, PADDED_SIZE=triton.next_power_of_2(size), HAS_SUMMAND=summand is not None,
                num_warps=8 if size > 2048 else 4,
            )  # fmt: skip
        return out
