"""The adapters in a decoder: a second forward over the same weights, and slots of what is added to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specray.engine.model.adapters.layers import LayerShape, LowRank, MakeLowRank, TorchLowRank, adapted
from specray.engine.model.adapters.parts import Matrices, Part, Place, parts_of, places_of
from specray.engine.model.adapters.rows import AdapterRows
from specray.engine.model.checkpoint.adapter import Adapter
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.decoder_config import DecoderConfig
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext

_log = logging.getLogger(__name__)


class AdapterPool:
    """What adapters add to one rank's decoder, each in a slot.

    Args:
        forward: the decoder without adapters, which stays as it is.
        config: of the decoder.
        num_slots: most adapters at a time.
        max_rank: most rank of an adapter's module.
        dtype, device: of the decoder.
        is_fixed: whether a row's bits on CUDA must not depend on its step.
    """

    def __init__(
        self,
        forward: DecoderForward,
        config: DecoderConfig,
        parallel: ParallelContext | None,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fixed: bool = False,
    ) -> None:
        self.rows = AdapterRows(num_slots, device)
        self.max_rank, self.num_slots = max_rank, num_slots
        self._config, self._parallel = config, parallel
        self._low_ranks: dict[Place, LowRank] = {}
        make = _maker(num_slots, dtype, device, is_fixed=is_fixed)
        layers = list(forward.layers)
        for place, shape in _shapes(config, parallel, max_rank).items():
            layer = layers[place.layer]
            made, self._low_ranks[place] = adapted(
                getattr(layer, place.field), shape, self.rows, num_slots, make
            )
            layers[place.layer] = replace(layer, **{place.field: made})
        self.forward = replace(forward, layers=tuple(layers))
        """The decoder in which rows have the adapters that ``rows`` says."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a step runs the same operators whatever adapters its rows have."""
        return not any(isinstance(each, TorchLowRank) for each in self._low_ranks.values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that adapters may change, of all ranks, by their names in a checkpoint."""
        shapes = self._config.weight_shapes()
        return {name: shapes[name] for _, names in places_of(self._config) for name in names}

    @property
    def max_numbers(self) -> int:
        """Numbers of the largest adapter, on all ranks."""
        return sum(self.max_rank * sum(shape) for shape in self.weight_shapes().values())

    def parts(self, adapter: Adapter) -> dict[Place, Part]:
        """An adapter's parts on this rank.

        Raises:
            ConfigError: it changes what adapters do not change here, or weights of other shapes.
        """
        layers = adapter.placed(self._config.weight_shapes())
        if others := sorted(layers.keys() - self.weight_shapes().keys()):
            raise ConfigError(
                f"{adapter.label} adapts {others[0]}; allowed while serving: projections of attention and of "
                "MLPs that are no experts"
            )
        matrices = {name: Matrices(*adapter.matrices(layer)) for name, layer in layers.items()}
        return parts_of(self._config, self._parallel, matrices)

    def put(self, slot: int, parts: Mapping[Place, Part]) -> None:
        """Gives a slot an adapter, in the place of the one that it had."""
        for place, low_rank in self._low_ranks.items():
            low_rank.clear(slot)
            if (part := parts.get(place)) is not None:
                low_rank.put(slot, part.down, part.ups)

    def clear(self, slot: int) -> None:
        """Frees what a slot had."""
        self.put(slot, {})


def _shapes(
    config: DecoderConfig, parallel: ParallelContext | None, max_rank: int
) -> dict[Place, LayerShape]:
    shapes = config.weight_shapes()
    one = {
        name: Matrices(torch.zeros(1, shapes[name][1]), torch.zeros(shapes[name][0], 1))
        for _, names in places_of(config)
        for name in names
    }
    return {
        place: LayerShape(
            part.down.shape[1], tuple(len(up) for up in part.ups), max_rank * part.rank, max_rank
        )
        for place, part in parts_of(config, parallel, one).items()
    }


def _maker(num_slots: int, dtype: torch.dtype, device: torch.device, *, is_fixed: bool) -> MakeLowRank:
    """Triton's kernels, where they work; else torch's operators."""
    if device.type == "cpu":
        return lambda shape: TorchLowRank(device, dtype, {})
    try:
        from specray.engine.cuda.low_rank_triton import TritonLowRank, check_low_rank

        check_low_rank(device, dtype)
    # Whatever a compiler or a driver raises: there is another way.
    except Exception as error:
        _log.warning(
            "steps with adapters run with torch's operators, and are not captured: %s: %s",
            type(error).__name__,
            error,
        )
        return lambda shape: TorchLowRank(device, dtype, {})
    return lambda shape: TritonLowRank(
        shape.in_features,
        shape.sizes,
        num_slots=num_slots,
        max_rank=shape.max_rank,
        max_own=shape.max_own,
        dtype=dtype,
        device=device,
        is_fixed=is_fixed,
    )
