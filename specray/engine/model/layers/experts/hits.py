"""Counts the experts that a forward hits: on the device, in each layer, and read without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specray.engine_info import RoutedExperts

if TYPE_CHECKING:
    from specray.engine.model.decoder import DecoderLayer
    from specray.engine.model.layers.experts.config import Experts


class ExpertHits:
    """Distinct experts that each layer's rows hit in the last forward.

    Args:
        info: of all the layers together.
        counts: ``[num_layers]``, int32, on the device; each layer writes its own with every forward.
    """

    def __init__(self, info: RoutedExperts, counts: torch.Tensor) -> None:
        self.info = info
        self._counts = counts
        self._on_host = torch.empty_like(counts, device="cpu", pin_memory=True) if counts.is_cuda else counts
        self._sent: torch.Event | None = torch.Event("cuda") if counts.is_cuda else None

    def send(self) -> None:
        """Copies the counts behind the forward that was begun last, before its results are waited for."""
        if self._sent is not None:
            self._on_host.copy_(self._counts, non_blocking=True)
            self._sent.record()

    def read(self) -> int:
        """The sum of the counts that were sent last, once results of that forward have come."""
        if self._sent is not None:
            # The results were behind it, or are there: nothing is waited for but the copy itself.
            self._sent.synchronize()
        return int(self._on_host.sum())


def count_hits(
    layers: Sequence[DecoderLayer], experts: Experts | None, device: torch.device
) -> tuple[tuple[DecoderLayer, ...], ExpertHits | None]:
    """The layers, those with experts counting what they hit; None: there are none, or all are chosen."""
    places = [index for index, layer in enumerate(layers) if layer.routed is not None]
    if experts is None or not places or experts.routing.num_chosen >= experts.num_routed:
        return tuple(layers), None
    counts = torch.zeros(len(places), dtype=torch.int32, device=device)
    counted = list(layers)
    for place, index in enumerate(places):
        counted[index] = layers[index].counting(counts[place : place + 1])
    # Of the chosen ones those that compute something, as often as if all were chosen alike.
    num_chosen = max(1, experts.routing.num_chosen * experts.num_experts // experts.num_routed)
    info = RoutedExperts(len(places) * experts.num_experts, len(places) * num_chosen)
    return tuple(counted), ExpertHits(info, counts)
