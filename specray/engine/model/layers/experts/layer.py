"""Several MLPs in the place of one: a router chooses some for each row.

Where there are kernels for it, the shapes of what runs do not depend on the choice, and nothing waits for it
on the host: such a layer is captured with the forward that it is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.linear import Gate, Linear


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A gated MLP."""

    gate: Gate
    down: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(rows))


class ExpertMlps(Protocol):
    """The MLPs of a layer on this rank."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a call runs the same operators whatever the choice."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether a row's bits are the same in every step."""
        ...

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each row's experts; a row's does not depend on the others.

        Args:
            rows: ``[num_rows, hidden_size]``, at least one.
            chosen: int64 ``[num_rows, num_chosen]``, each row's distinct.
            weights: float32, of the same shape.
            hits: receives the number of distinct experts among ``chosen``, ``[1]``, int32.

        Returns:
            ``[num_rows, hidden_size]``, in the rows' type, summed in float32 in the order of choice.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExpertsInTurn:
    """Implements :class:`ExpertMlps` with torch's operators, where there are no kernels of ours.

    One expert after the other: the host waits for the choice.
    """

    experts: Sequence[ExpertMlp]

    @property
    def can_be_captured(self) -> bool:
        return False

    @property
    def is_fixed(self) -> bool:
        return False

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows, num_chosen = chosen.shape
        order = chosen.reshape(-1).argsort(stable=True)
        # Of row i's j-th expert, at i * num_chosen + j.
        sources = rows[order // num_chosen]
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.experts)).tolist()
        if hits is not None:
            hits.fill_(sum(count > 0 for count in counts))
        outputs = torch.empty(num_rows * num_chosen, rows.shape[1], dtype=rows.dtype, device=rows.device)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                outputs[order[first : first + count]] = expert(sources[first : first + count])
                first += count
        weighted = outputs.view(num_rows, num_chosen, rows.shape[1]).float() * weights[..., None]
        return weighted.sum(1).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class Latent:
    """Linear layers from the hidden state to what experts read, and back (Nemotron 3, 2025)."""

    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The MLPs of a layer on this rank and their router, in the place of ``decoder.DecoderLayer.gate``."""

    router: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """What ``routing.Router`` does."""
    experts: ExpertMlps
    hits: torch.Tensor | None = None
    """Receives the number of experts that a forward's rows hit, ``[1]``, int32; None: nobody counts."""
    latent: Latent | None = None
    """What is around the experts, and not the router; None: they read the hidden state."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a call runs the same operators whatever the choice."""
        return self.experts.can_be_captured

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, ``[num_rows, hidden_size]``."""
        if len(rows) == 0:
            if self.hits is not None:
                self.hits.zero_()
            return torch.empty_like(rows)
        read = rows if self.latent is None else self.latent.down(rows)
        out = self.experts(read, *self.router(rows), self.hits)
        return out if self.latent is None else self.latent.up(out)


@dataclass(frozen=True, slots=True)
class Sum:
    """Implements ``decoder.Projection`` for rows that are of the residual stream's size already."""

    parallel: ParallelContext | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.parallel is None else self.parallel.all_reduce(rows)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return summand.add_(self(rows))
