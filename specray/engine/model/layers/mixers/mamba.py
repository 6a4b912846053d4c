"""Layers of Mamba 2 (Dao and Gu, *Transformers are SSMs*, 2024) between their projections, with torch.

It is the recurrence of the delta rule without the rule: of each token a head learns its input, times a step
that the token chooses; the longer the step, the more it forgets. What the paper calls C, B and x are queries,
keys and values here; some heads, a *group*, share the first two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specray.engine.cache.state_pool import LayerStates, StatePool, StateRows
from specray.engine.model.layers.convolution import convolve
from specray.engine.model.layers.recurrences import HeadRows, by_sequence, recur
from specray.engine.step import StateShape

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """RMS norm of each group's outputs, of which a rank may have a part alone."""

    weight: torch.Tensor  # [num_groups, size], float32, of this rank
    eps: float
    is_first: bool = False
    """It is of outputs before their gate; else of gated ones."""
    parallel: ParallelContext | None = None
    """The ranks, where several have parts of one group; None: none has."""
    num_shared: int = 1
    """Ranks that have parts of one group."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, num_groups * size]`` to the same, float32."""
        groups = rows.float().view(-1, *self.weight.shape)
        means = groups.square().mean(-1)
        if self.parallel is not None:
            # A column for each group of the model, to which its ranks add their parts.
            place = self.parallel.rank // self.num_shared
            sums = means.new_zeros(len(means), self.parallel.world_size // self.num_shared)
            sums[:, place] = means[:, 0] / self.num_shared
            means = self.parallel.all_reduce(sums)[:, place, None]
        return (groups * torch.rsqrt(means + self.eps)[..., None] * self.weight).flatten(1)


@dataclass(frozen=True, slots=True)
class Mamba:
    """Implements ``delta.Mixer``.

    Rows are ``[C | B | x | z | dt]``: the queries and keys of all groups and the values of all heads, which
    are convolved; a gate of each output; and of each head what gives its step.
    """

    shape: StateShape
    num_groups: int
    taps: torch.Tensor  # [num_taps, num_channels], float32
    conv_bias: torch.Tensor  # [num_channels], float32
    decay_rates: torch.Tensor  # [num_heads], float32: A, above 0
    step_bias: torch.Tensor  # [num_heads], float32
    skips: torch.Tensor  # [num_heads], float32: D, the share of a value that is an output at once
    norm: GroupNorm | None
    steps: tuple[float, float] = (0.0, float("inf"))
    """Least and longest step."""
    step_scale: float = 1.0
    gate_scale: float = 1.0

    @property
    def can_be_captured(self) -> bool:
        return False

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        size = self.shape.num_heads * self.shape.value_dim
        out = by_sequence(self.run, projected, pool, place, size)
        return self.finished(out, projected)

    def run(self, projected: torch.Tensor, layer: LayerStates, item: StateRows) -> torch.Tensor:
        """Outputs of the rows of one sequence, which are gated unless a norm is first."""
        heads, values = self._heads(projected, layer, item)
        out = torch.empty_like(values)
        recur(heads, layer, item, out)
        out = (out + values * self.skips[:, None]).flatten(1)
        if self.norm is None or not self.norm.is_first:
            out = out * self._gate(projected)
        return out

    def finished(self, out: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Outputs of all rows of a step, normed and gated."""
        if self.norm is None:
            return out
        normed = self.norm(out)
        if self.norm.is_first:
            normed = normed * self._gate(projected)
        return normed.to(projected.dtype)

    def _gate(self, projected: torch.Tensor) -> torch.Tensor:
        z = projected[:, self.shape.num_channels :][:, : self.shape.num_heads * self.shape.value_dim]
        return F.silu(z.float() * self.gate_scale)

    def _heads(
        self, projected: torch.Tensor, layer: LayerStates, item: StateRows
    ) -> tuple[HeadRows, torch.Tensor]:
        """What heads have of rows, and their values before these are multiplied by steps."""
        shape, num_rows = self.shape, len(projected)
        num_keys, num_values = self.num_groups * shape.key_dim, shape.num_heads * shape.value_dim
        mixed, dt = projected[:, : shape.num_channels], projected[:, shape.num_channels + num_values :]
        mixed = F.silu(convolve(mixed, self.taps, self.conv_bias, layer, item))
        queries, keys, values = torch.split(mixed, [num_keys, num_keys, num_values], -1)
        queries, keys = (each.view(num_rows, self.num_groups, shape.key_dim) for each in (queries, keys))
        values = values.view(num_rows, shape.num_heads, shape.value_dim)
        steps = F.softplus(dt.float() * self.step_scale + self.step_bias).clamp(*self.steps)
        log_decays = (-self.decay_rates * steps)[..., None]
        return HeadRows(queries, keys, values * steps[..., None], log_decays, None), values
