"""The adapters in a decoder: a second forward over the same weights, and slots of what is added to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specray.engine.model.adapters.layers import (
    LayerShape,
    LowRank,
    MakeLowRank,
    Packed,
    TorchLowRank,
    adapted,
)
from specray.engine.model.adapters.parts import Matrices, Place, parts_of, places_of
from specray.engine.model.adapters.rows import AdapterRows
from specray.engine.model.checkpoint.adapter import Adapter
from specray.engine.model.decoder import DecoderForward, DecoderLayer
from specray.engine.model.decoder_config import DecoderConfig
from specray.engine.model.layers.latent.projections import LatentQueries
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext

_KINDS = {
    ".experts.": "an expert's",
    ".shared_expert": "a shared expert's",
    ".mlp.gate.": "a router",
    ".kv_b_proj.": "which latent attention absorbs",
    ".linear_attn.": "a recurrent layer's",
    ".mamba.": "a recurrent layer's",
    ".conv.": "a recurrent layer's",
    "embed_tokens.": "the embedding",
    "lm_head.": "the head",
}
"""What weights are that adapters do not change, by a part of their names."""
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
        self.num_late_bytes = 0
        """Bytes that adapters take at most on this rank, beside what is taken for them now."""
        make = _maker(num_slots, dtype, device, is_fixed=is_fixed)
        layers = list(forward.layers)
        for place, shape in _shapes(config, parallel, max_rank).items():
            layers[place.layer], self._low_ranks[place] = _with_adapters(
                layers[place.layer],
                place.field,
                partial(adapted, shape=shape, rows=self.rows, num_slots=num_slots, make=make),
            )
            if isinstance(self._low_ranks[place], TorchLowRank):
                numbers = shape.max_rank * (shape.in_features + sum(shape.sizes))
                self.num_late_bytes += num_slots * numbers * dtype.itemsize
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

    def packed(self, adapter: Adapter) -> dict[Place, Packed]:
        """An adapter's parts on this rank, as layers take them; for any thread.

        Raises:
            ConfigError: it changes what adapters do not change here, or weights of other shapes.
        """
        layers = adapter.placed(self._config.weight_shapes())
        if others := sorted(layers.keys() - self.weight_shapes().keys()):
            raise ConfigError(
                f"{adapter.label} adapts {others[0]}{_kind_of(others[0])}; allowed while serving: "
                "projections of attention and of MLPs that are no experts"
            )
        matrices = {name: Matrices(*adapter.matrices(layer)) for name, layer in layers.items()}
        parts = parts_of(self._config, self._parallel, matrices)
        return {place: self._low_ranks[place].pack(part.down, part.ups) for place, part in parts.items()}

    def put(self, slot: int, parts: Mapping[Place, Packed]) -> None:
        """Gives a slot an adapter, in the place of the one that it had."""
        for place, low_rank in self._low_ranks.items():
            low_rank.clear(slot)
            if (packed := parts.get(place)) is not None:
                low_rank.put(slot, packed)

    def clear(self, slot: int) -> None:
        """Frees what a slot had."""
        self.put(slot, {})


def _with_adapters(
    layer: DecoderLayer, field: str, change: Callable[[object], tuple[Any, LowRank]]
) -> tuple[DecoderLayer, LowRank]:
    """The layer with one of its linear layers changed."""
    queries = layer.qkv
    if isinstance(queries, LatentQueries) and field in ("qkv", "query_up"):
        name = "down" if field == "qkv" else "query_up"
        made, low_rank = change(getattr(queries, name))
        return replace(layer, qkv=replace(queries, **{name: made})), low_rank
    made, low_rank = change(getattr(layer, field))
    return replace(layer, **{field: made}), low_rank


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


def _kind_of(name: str) -> str:
    return next((f", {kind}" for part, kind in _KINDS.items() if part in name), "")


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
