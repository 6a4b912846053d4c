"""Reads a target as its heads see it: residuals of some layers, what its own head reads, and logits.

A run sees its text several times, and its features are the same each time: they are stored, so
that the target runs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specray.errors import ConfigError
from specray.train.draft.loss import TargetProbs, view_of
from specray.train.heads.base import text_section, whole_number

_PRODUCT_TOLERANCE = 0.02
"""Share of the largest logit by which a product with the target's head may miss its logits."""

_LEAST_SIZE = 0.01
"""Least size of a number that a head reads, as a share of the median."""


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a forward of the target gives for rows of token ids."""

    features: dict[int, torch.Tensor]
    """Features by layer, ``[num_rows, length, hidden_size]`` each."""
    last: torch.Tensor
    """What the target's own head reads, ``[num_rows, length, hidden_size]``."""
    logits: torch.Tensor
    """Logits ``[num_rows, length, vocab_size]``."""


class FeatureReader:
    """A target and the layers that are read.

    Layers are numbered as ``output_hidden_states`` does: 0 is the embedding, k what enters layer k. The
    number of layers is what leaves the last one, before the final norm, and one more is that norm's output.

    Args:
        model: any causal language model of transformers.

    Raises:
        ConfigError: the target has no such layer, or its final norm is not found.
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self.model = model
        self._layers = layers
        self._num_layers = whole_number(text_section(model.config), "num_hidden_layers")
        if not all(0 <= layer <= self._num_layers + 1 for layer in layers):
            raise ConfigError(
                f"layers are {list(layers)}; allowed: 0..{self._num_layers}, the target's, and one more"
            )
        self._final_norm: Any = None
        if self._num_layers in layers:
            self._final_norm = getattr(model.get_decoder(), "norm", None)
            if self._final_norm is None:
                raise ConfigError(
                    f"layers are {list(layers)}, but the target has no module 'norm' behind its last layer; "
                    f"allowed: layers below {self._num_layers}"
                )

    @torch.no_grad()
    def read(self, token_ids: torch.Tensor) -> TargetRows:
        """Runs the target over rows of token ids, without a cache."""
        entering: list[torch.Tensor] = []
        handle = None
        if self._final_norm is not None:
            handle = self._final_norm.register_forward_pre_hook(
                lambda module, arguments: entering.append(arguments[0])
            )
        try:
            output = self.model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        finally:
            if handle is not None:
                handle.remove()
        states = output.hidden_states
        found = {
            layer: entering[-1] if layer == self._num_layers else states[min(layer, self._num_layers)]
            for layer in self._layers
        }
        return TargetRows(found, states[self._num_layers], output.logits)


def usual_sizes(reader: FeatureReader, layers: tuple[int, ...], token_ids: torch.Tensor) -> torch.Tensor:
    """Median size of each number that a head reads, ``[len(layers) * hidden_size]``.

    The median, since some tokens, such as the first, have numbers a thousand times as large.

    Args:
        token_ids: rows of text, ``[num_rows, length]``.
    """
    rows = [reader.read(ids[None]).features for ids in token_ids]
    sizes = [torch.cat([row[layer][0] for row in rows]).float().abs().median(0).values for layer in layers]
    found = torch.cat(sizes)
    return found.clamp(min=_LEAST_SIZE * float(found.median()))


@dataclass(frozen=True, slots=True)
class ReadRows:
    """What a head reads of its target, and what it is compared with, of rows of token ids."""

    features: dict[int, torch.Tensor]
    """Features by layer, ``[num_rows, length, hidden_size]`` each."""
    views: list[TargetProbs]
    """The target's distribution over the head's tokens, one view for each row."""
    best: torch.Tensor
    """The target's most likely tokens, ``[num_rows, length]``."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Features and logits of a row, in memory of the CPU."""

    features: dict[int, torch.Tensor]
    said: torch.Tensor
    """What the target's own head reads, ``[length, hidden_size]``: logits follow from it, and are far larger.
    Where they do not, the logits of the head's tokens."""
    log_total: torch.Tensor
    """Logarithm of the sum of all exponentials of logits, ``[length]``."""
    best: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors())

    def on_cpu(self) -> _Row:
        """A copy without references to other rows; a layer that the head uses twice is copied once."""
        copies = {id(each): each.to("cpu", copy=True) for each in self._tensors()}
        return _Row(
            {layer: copies[id(each)] for layer, each in self.features.items()},
            copies[id(self.said)],
            copies[id(self.log_total)],
            copies[id(self.best)],
        )

    def _tensors(self) -> list[torch.Tensor]:
        every = (*self.features.values(), self.said, self.log_total, self.best)
        return list({id(each): each for each in every}.values())


class TargetReadings:
    """A target over rows of token ids, each of which it runs over once as long as there is memory.

    Args:
        reader: reads the head's layers.
        draft_ids: the target's ids that the head can propose, ascending.
        max_bytes: memory for stored rows; rows beyond it are computed again each time.
    """

    def __init__(self, reader: FeatureReader, draft_ids: torch.Tensor, *, max_bytes: int) -> None:
        self._reader = reader
        self._draft_ids = draft_ids
        self._room = max_bytes
        self._kept: dict[bytes, _Row] = {}
        head = reader.model.get_output_embeddings()
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        is_all = len(draft_ids) == len(weight)
        self._weight = weight if is_all else weight[draft_ids]
        self._bias = bias if is_all or bias is None else bias.detach()[draft_ids]
        self._is_product: bool | None = None

    @torch.no_grad()
    def read(self, token_ids: torch.Tensor) -> ReadRows:
        """What the target says of rows of token ids, ``[num_rows, length]``, on their device."""
        # Row by row: what is said of one does not depend on those that were read before.
        rows = [self._row(ids) for ids in token_ids]
        device = token_ids.device
        return ReadRows(
            {
                layer: torch.stack([row.features[layer].to(device) for row in rows])
                for layer in rows[0].features
            },
            [self._view(row, device) for row in rows],
            torch.stack([row.best.to(device) for row in rows]),
        )

    def _row(self, ids: torch.Tensor) -> _Row:
        key = ids.cpu().numpy().tobytes()
        if key in self._kept:
            return self._kept[key]
        read = self._reader.read(ids[None])
        logits, last = read.logits[0].float(), read.last[0]
        own = logits[:, self._draft_ids]
        if self._is_product is None:
            # Some targets cap or scale what their head gives.
            missed = (self._product(last) - own).abs().max()
            self._is_product = bool(missed <= _PRODUCT_TOLERANCE * own.abs().max())
        row = _Row(
            {layer: last if each is read.last else each[0] for layer, each in read.features.items()},
            last if self._is_product else own,
            logits.logsumexp(-1),
            logits.argmax(-1),
        )
        if row.num_bytes <= self._room:
            self._room -= row.num_bytes
            # Rows that are not stored stay where they are.
            self._kept[key] = row = row.on_cpu()
        return row

    def _view(self, row: _Row, device: torch.device) -> TargetProbs:
        said, best = row.said.to(device), row.best.to(device)
        logits = self._product(said) if self._is_product else said
        return view_of(logits - row.log_total.to(device)[:, None], best, self._draft_ids)

    def _product(self, last: torch.Tensor) -> torch.Tensor:
        return F.linear(last, self._weight, self._bias).float()
