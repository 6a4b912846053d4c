"""Linear layers and gated pairs of Triton's products. Importing it needs triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from specray.engine.activation import Joint
from specray.engine.cuda.align import Alignment
from specray.engine.cuda.codes.packed import PackedWeight, stack_packed
from specray.engine.cuda.codes.product_triton import multiply
from specray.engine.cuda.epilogue import Epilogue, PlainWeight
from specray.engine.cuda.low_rank_triton import join
from specray.engine.cuda.plain_triton import multiply_plain
from specray.engine.cuda.tiles import FREE, TileRule

Multiplied: TypeAlias = PackedWeight | PlainWeight
"""A weight that is multiplied here."""


def multiply_any(
    rows: torch.Tensor,
    weight: Multiplied,
    out: torch.Tensor,
    epilogue: Epilogue,
    rule: TileRule = FREE,
    tiles: Alignment | None = None,
) -> torch.Tensor:
    """What ``multiply_plain`` does, or ``multiply``, as the weight needs it."""
    if isinstance(weight, PlainWeight):
        return multiply_plain(rows, weight, out, epilogue, tiles=tiles, rule=rule)
    return multiply(rows, weight, out, epilogue, tiles=tiles, rule=rule)


def stack(weights: Sequence[Multiplied]) -> Multiplied:
    """One weight of those of experts that are alike."""
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    if packed:
        return stack_packed(packed)
    return PlainWeight(torch.stack([each.numbers for each in weights if isinstance(each, PlainWeight)]))


@dataclass(frozen=True, slots=True)
class ProductLinear:
    """Implements ``linear.Linear``: parts of output features, each in its own form."""

    parts: tuple[Multiplied, ...]
    bias: torch.Tensor | None
    dtype: torch.dtype
    """The model's data type: of rows and of outputs."""
    rule: TileRule = FREE

    @property
    def size(self) -> int:
        """Output features."""
        return sum(part.size for part in self.parts)

    @property
    def num_weights(self) -> int:
        return sum(part.num_weights for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._into(rows, self._empty(rows, self.dtype))

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self._into(rows, self._empty(rows, torch.float32))

    def precise_into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._into(rows, out)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self._into(rows, self._empty(rows, self.dtype), summand)

    def _empty(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(len(rows), self.size, dtype=dtype, device=rows.device)

    def _into(
        self, rows: torch.Tensor, out: torch.Tensor, summand: torch.Tensor | None = None
    ) -> torch.Tensor:
        first = 0
        for part in self.parts:
            columns = slice(first, first + part.size)
            epilogue = Epilogue(
                None if self.bias is None else self.bias[columns],
                None if summand is None else summand[:, columns],
            )
            multiply_any(rows, part, out[:, columns], epilogue, self.rule)
            first = columns.stop
        return out


@dataclass(frozen=True, slots=True)
class ProductGate:
    """Implements ``linear.Gate``: both layers and the activation in one product."""

    both: Multiplied
    """The gate's output features before those of up."""
    bias: torch.Tensor | None
    joint: Joint
    dtype: torch.dtype
    rule: TileRule = FREE

    @property
    def num_weights(self) -> int:
        return self.both.num_weights

    @property
    def num_bytes(self) -> int:
        return self.both.num_bytes

    @property
    def in_features(self) -> int:
        return self.both.in_features

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), self.both.size // 2, dtype=self.dtype, device=rows.device)
        return multiply_any(rows, self.both, out, Epilogue(self.bias, joint=self.joint), self.rule)

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """Both layers' sums in float32: see ``adapters.layers.SplitGate``."""
        out = torch.empty(len(rows), self.both.size, dtype=torch.float32, device=rows.device)
        return multiply_any(rows, self.both, out, Epilogue(self.bias), self.rule)

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        """What the product's epilogue makes of its sums."""
        return join(both, self.joint, self.dtype)
