"""The projections around latent attention, with torch's operators.

Since ``q . (W_k latent) = (W_k^T q) . latent``, queries are taken to the latents' space and attend there,
with one kv head whose values are the latents themselves; what comes out is taken back by each head's ``W_v``.
So the cache holds ``[latent | rotated]`` of a token, and nothing is made of it again. Every row is computed
so, of a prompt too: keys and values made anew would give other bits, and which rows get them would be a
matter of how a prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from specray.engine.model.layers.normed import Rows


class RowNorm(Protocol):
    """RMS norm over the last dimension of ``[num_rows, size]``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class HeadProduct(Protocol):
    """A linear layer of each head."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, input and output features of each."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, num_heads, in_features]`` to ``[num_rows, num_heads * out_features]``.

        The numbers of a head follow each other; heads and rows need not.
        """
        ...


@dataclass(frozen=True, slots=True)
class TorchHeadProduct:
    """Implements :class:`HeadProduct`."""

    weight: torch.Tensor  # [num_heads, in_features, out_features]

    @property
    def shape(self) -> tuple[int, int, int]:
        num_heads, in_features, out_features = self.weight.shape
        return num_heads, in_features, out_features

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows.transpose(0, 1), self.weight).transpose(0, 1).reshape(len(rows), -1)


class Projection(Protocol):
    """Back to the residual stream (``decoder.Projection``)."""

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Replaces a qkv projection: absorbed queries, and behind them the key of each row.

    ``[num_rows, hidden_size]`` to ``[num_rows, (num_heads + 1) * (latent_dim + rotated_dim)]``.
    """

    down: Rows
    """Projection to queries, or to what they are made of, and to latents with their rotated part."""
    query_norm: RowNorm | None
    query_up: Rows | None
    """Projection of the normed to queries; None: they are there already."""
    latent_norm: RowNorm
    keys: HeadProduct
    """Projection of the plain part of a head's query to the latents' space."""
    rotated_dim: int

    @property
    def linears(self) -> tuple[Rows, ...]:
        """Linear layers, in the forward's order."""
        return (self.down,) if self.query_up is None else (self.down, self.query_up)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, joined = len(rows), self.down(rows)
        num_heads, plain_dim, latent_dim = self.keys.shape
        first, key = joined.tensor_split((joined.shape[1] - latent_dim - self.rotated_dim,), dim=1)
        if self.query_up is not None and self.query_norm is not None:
            first = self.query_up(self.query_norm(first.contiguous()))
        heads = first.view(num_rows, num_heads, plain_dim + self.rotated_dim)
        out = joined.new_empty(num_rows, num_heads + 1, latent_dim + self.rotated_dim)
        absorbed = self.keys(heads[..., :plain_dim])
        out[:, :num_heads, :latent_dim] = absorbed.view(num_rows, num_heads, latent_dim)
        out[:, :num_heads, latent_dim:] = heads[..., plain_dim:]
        out[:, num_heads, :latent_dim] = self.latent_norm(key[:, :latent_dim].contiguous())
        out[:, num_heads, latent_dim:] = key[:, latent_dim:]
        return out.view(num_rows, -1)


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """Implements ``decoder.Projection``: each head's values of the latents it attended to, and the output."""

    values: HeadProduct
    linear: Projection

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        num_heads, latent_dim, _ = self.values.shape
        return self.linear.plus(self.values(rows.view(len(rows), num_heads, latent_dim)), summand)
