"""Reads a target as its heads see it: residuals of some layers, what its own head reads, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specray.errors import ConfigError
from specray.train.heads.base import text_section, whole_number


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a forward of the target gives for rows of token ids."""

    features: dict[int, torch.Tensor]
    """Features by layer, ``[num_rows, length, hidden_size]`` each."""
    logits: torch.Tensor
    """Logits ``[num_rows, length, vocab_size]``."""


class FeatureReader:
    """A target and the layers that are read.

    Layers are numbered as ``output_hidden_states`` does: 0 is the embedding, k what enters layer k. The
    number of layers is what leaves the last one, before the final norm, and one more is behind that norm.

    Args:
        model: any causal language model of transformers.

    Raises:
        ConfigError: the target has no such layer, or its final norm is not found.
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self._model = model
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
            output = self._model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        finally:
            if handle is not None:
                handle.remove()
        states = output.hidden_states
        found = {
            layer: entering[-1] if layer == self._num_layers else states[min(layer, self._num_layers)]
            for layer in self._layers
        }
        return TargetRows(found, output.logits)
