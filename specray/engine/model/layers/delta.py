"""Layers of the gated delta rule (Qwen3-Next, Kimi Linear), with torch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from specray.engine.cache.state_pool import LayerStates, StatePool, StateRows
from specray.engine.model.layers.convolution import convolve
from specray.engine.model.layers.recurrences import HeadRows, by_sequence, recur
from specray.engine.step import StateShape

if TYPE_CHECKING:
    from specray.engine.model.layers.latent.projections import HeadProduct
    from specray.engine.model.layers.normed import Rows

_NORM_EPS = 1e-6
"""Number under the root of a query's or key's norm, as the published models have it."""


class Mixer(Protocol):
    """What lies between a recurrent layer's input and output projection."""

    @property
    def shape(self) -> StateShape: ...

    @property
    def can_be_captured(self) -> bool:
        """Whether a step without prompts always runs the same operators, and waits for nothing."""
        ...

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        """Runs the rows of the pool's step through layer ``place`` of the pool."""
        ...


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Implements :class:`Mixer`.

    Rows are ``[queries | keys | values | z | b | a]``: all heads' queries, keys and values, which are
    convolved; a gate of each output; and of each head what gives its rate of learning and its decays: one, or
    one for each of a key's numbers (Kimi delta attention).
    """

    shape: StateShape
    taps: torch.Tensor  # [num_taps, num_channels], float32
    decay_rates: torch.Tensor  # [num_heads], float32: A, above 0
    decay_bias: torch.Tensor  # [num_heads * gate_dim], float32
    norm: torch.Tensor  # [value_dim], float32
    eps: float
    rate_scale: float = 1.0
    """Largest rate of learning; with 2, a state may change its sign."""
    has_sigmoid: bool = False
    """The gate of outputs is a sigmoid; else SiLU."""
    least_log_decay: float | None = None
    """Least logarithm of a decay, of which a sigmoid is the share; None: there is none."""

    @property
    def can_be_captured(self) -> bool:
        return False

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        size = self.shape.num_heads * self.shape.value_dim
        return by_sequence(self.run, projected, pool, place, size)

    def run(self, projected: torch.Tensor, layer: LayerStates, item: StateRows) -> torch.Tensor:
        """The rows of one sequence."""
        shape = self.shape
        heads = self.heads(projected, layer, item)
        out = torch.empty_like(heads.values)
        recur(heads, layer, item, out)
        z = projected[:, shape.num_channels :][:, : shape.num_heads * shape.value_dim]
        normed = F.rms_norm(out, self.norm.shape, self.norm, self.eps).flatten(1)
        gate = z.float().sigmoid() if self.has_sigmoid else F.silu(z.float())
        return (normed * gate).to(projected.dtype)

    def heads(self, projected: torch.Tensor, layer: LayerStates, item: StateRows) -> HeadRows:
        shape, num_rows = self.shape, len(projected)
        num_keys, num_values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
        sizes = [shape.num_channels, num_values, shape.num_heads, shape.num_heads * shape.gate_dim]
        mixed, _, b, a = torch.split(projected, sizes, -1)
        mixed = F.silu(convolve(mixed, self.taps, None, layer, item))
        queries, keys, values = torch.split(mixed, [num_keys, num_keys, num_values], -1)
        queries, keys = (
            _normed(each.view(num_rows, shape.num_key_heads, shape.key_dim)) for each in (queries, keys)
        )
        steps = (a.float() + self.decay_bias).view(num_rows, shape.num_heads, shape.gate_dim)
        rates = self.decay_rates[:, None]
        if self.least_log_decay is None:
            log_decays = -rates * F.softplus(steps)
        else:
            log_decays = self.least_log_decay * (rates * steps).sigmoid()
        return HeadRows(
            queries * shape.key_dim**-0.5,
            keys,
            values.view(num_rows, shape.num_heads, shape.value_dim),
            log_decays,
            b.float().sigmoid() * self.rate_scale,
        )


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """In the place of one linear layer: what :class:`GatedDelta` takes, gates and decays in two steps.

    All heads' are made of the same few numbers (*Kimi Linear*, 2025).
    """

    linear: Rows
    """To ``[queries | keys | values | b]``, and to what gates and decays are made of, as many for each."""
    gates: HeadProduct
    decays: HeadProduct

    def parts(self, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Numbers of the linear layer that stay, and what each head makes gates and decays of."""
        num_heads, rank, _ = self.gates.shape
        sizes = [joined.shape[1] - num_heads - 2 * rank, num_heads, rank, rank]
        mixed, b, gates, decays = torch.split(joined, sizes, 1)
        return mixed, b, *(each[:, None].expand(-1, num_heads, -1) for each in (gates, decays))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        mixed, b, gates, decays = self.parts(self.linear(rows))
        return torch.cat((mixed, self.gates(gates), b, self.decays(decays)), 1)


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _NORM_EPS)
