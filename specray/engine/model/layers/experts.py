"""Several MLPs in the place of one: a router chooses some for each row.

Rows are sorted by expert, so that each expert multiplies all of its rows at once; on CPU all experts that are
hit do so in one job. Which are hit is known on the host: such a forward cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specray.engine.activation import Clamp
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.model.layers.routing import Router
    from specray.engine.model.linear import Gate, Linear


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """``clamp(gate) * sigmoid(gain * clamp(gate)) * (clamp(up) + 1)`` of two linear layers, as in gpt-oss."""

    both: Linear
    """The gate's outputs before those of up."""
    clamp: Clamp

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return clamped(self.both(rows), self.clamp)


def clamped(both: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """What follows the linear layers of a :class:`ClampedGate`."""
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(gate * clamp.gain) * (up + 1.0)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A gated MLP."""

    gate: Gate | ClampedGate
    down: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(rows))


class LayerGroup(Protocol):
    """Linear layers of one shape, of which each multiplies rows of its own."""

    def takes(self, counts: NDArray[np.int64]) -> bool:
        """Whether that many rows of layers can be multiplied at once."""
        ...

    def __call__(
        self, rows: torch.Tensor, layers: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Multiplies the first ``counts[0]`` rows by layer ``layers[0]``, the next by the next, ..."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """All experts of a layer as one; the numbers are those of each by itself."""

    gate: LayerGroup
    down: LayerGroup
    clamp: Clamp | None
    """Bounds of the gate's numbers, where it is a :class:`ClampedGate`; None: there are none."""

    def __call__(
        self, rows: torch.Tensor, experts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Sends the first ``counts[0]`` rows through expert ``experts[0]``, the next through the next, ..."""
        gated = self.gate(rows, experts, counts)
        return self.down(gated if self.clamp is None else clamped(gated, self.clamp), experts, counts)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The MLPs of a layer on this rank, in the place of ``decoder.DecoderLayer.gate``."""

    router: Router
    experts: Sequence[ExpertMlp]
    group: ExpertGroup | None = None
    """All of them as one; None: there are no kernels for that here."""
    hits: torch.Tensor | None = None
    """Receives the number of experts that a forward's rows hit, ``[1]``, int32; None: nobody counts."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's experts, ``[num_rows, hidden_size]``."""
        chosen, weights = self.router(rows)
        num_rows, num_chosen = chosen.shape
        order = chosen.view(-1).argsort(stable=True)
        # Of row i's j-th expert, at i * num_chosen + j.
        sources = order // num_chosen
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        outputs = self._outputs(rows[sources], np.array(counts))
        ordered = torch.empty_like(outputs)
        ordered[order] = outputs
        # One row's sum has one order, whatever rows are next to it.
        weighted = ordered.view(num_rows, num_chosen, rows.shape[1]).float() * weights[..., None]
        return weighted.sum(1).to(rows.dtype)

    def _outputs(self, rows: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
        """Each row through its expert; ``counts``: rows of each expert, in the order of ``rows``."""
        [hit] = counts.nonzero()
        if self.hits is not None:
            self.hits.fill_(len(hit))
        if self.group is not None and len(hit) and self.group.gate.takes(counts):
            return self.group(rows, hit, counts[hit])
        outputs = torch.empty_like(rows)
        first = 0
        for expert in hit.tolist():
            run = slice(first, first + int(counts[expert]))
            outputs[run] = self.experts[expert](rows[run])
            first = run.stop
        return outputs


@dataclass(frozen=True, slots=True)
class Sum:
    """Implements ``decoder.Projection`` for rows that are of the residual stream's size already."""

    parallel: ParallelContext | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.parallel is None else self.parallel.all_reduce(rows)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return summand.add_(self(rows))
