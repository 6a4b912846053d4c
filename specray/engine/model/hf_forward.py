"""Any causal LM of transformers over the block cache, without code per architecture.

The model runs with ``use_cache=False`` on all rows of a step as one sequence; the library's
AttentionInterface hands each layer's queries, keys and values to :func:`_block_attention`, together with the
keyword arguments of the call, and that is where the cache comes in. No mask function is registered under our
name, so the library builds no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from specray.engine.attention.latent import from_latent, keep_latents, keeps_latents, to_latent
from specray.engine.attention.scores import ScoreRule
from specray.engine.attention.sdpa import SdpaStep
from specray.engine.cache.blocks import BlockCache
from specray.engine.model.checks.messages import first_line
from specray.engine.model.checks.modalities import quiet_library
from specray.engine.step import AttentionStep, CacheShape, ForwardOutput, LayerShape, SequenceRows, Step
from specray.errors import ConfigError

ATTENTION_NAME = "specray_blocks"
_CHECKED_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)
_CHUNKS = (0, 4), (4, 8)
"""First and last + 1 token of each step of the check."""
_UNSUPPORTED = {
    "head_mask": "a mask of heads",
    "position_bias": "a bias by position",
    "cu_seq_lens_q": "sequences packed in its own way",
    "encoder_hidden_states": "an encoder's states",
}
"""Arguments that change what attention computes and are not implemented here, and what they are in words."""


class _Attention(Protocol):
    """What a layer calls: the step of a real forward, or the probe."""

    def attend(self, layer: int, rows: _LayerRows) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _LayerRows:
    """Queries, keys and values of a layer, ``[num_rows, heads, size]`` each, and how they attend."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    """Values; of no size for latents."""
    scale: float
    window: int | None
    rule: ScoreRule | None
    latent_dim: int = 0
    """First numbers of a key that are its value; 0: values are stored."""

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.key.shape[1], self.key.shape[2], self.value.shape[2])

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.value.shape[2]


class _CachedAttention:
    """Attends over the block cache."""

    def __init__(self, step: AttentionStep, places: Mapping[int, int]) -> None:
        self._step = SdpaStep(step)
        self._places = places
        """Place in the cache of each layer that keeps keys and values."""

    def attend(self, layer: int, rows: _LayerRows) -> torch.Tensor:
        """Returns ``[num_rows, num_heads * value_dim]``."""
        if rows.key.shape[2] == rows.value.shape[2]:
            keys_values = torch.cat((rows.key, rows.value), dim=1)
        else:
            keys_values = torch.cat((rows.key.flatten(1), rows.value.flatten(1)), dim=1)
        return self._step.attend(
            self._places[layer],
            rows.query,
            keys_values,
            scale=rows.scale,
            window=rows.window,
            rule=rows.rule,
            latent_dim=rows.latent_dim,
        )


class HfForward:
    """Runs a transformers model as it is, attention excepted.

    Raises:
        ConfigError: the architecture's attention cannot be replaced, some of its layers keep nothing, or
            it keeps more than keys and values.
    """

    name = "hf"

    def __init__(self, model: PreTrainedModel, feature_layers: tuple[int, ...] = ()) -> None:
        self.model = model
        self._tap = _Tap(model, feature_layers)
        expected = _plain_logits(model)
        AttentionInterface.register(ATTENTION_NAME, _block_attention)
        with quiet_library():  # It warns of other parts that are no more.
            model.set_attn_implementation(ATTENTION_NAME)
        keep_latents(model)
        probe = _Probe()
        self._probe(probe)
        self._places = probe.places(type(model).__name__)
        self.cache_shape = probe.cache_shape
        self._check(expected.float())

    @torch.inference_mode()
    def _probe(self, probe: _Probe) -> None:
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        self.model(one_token, position_ids=one_token, attention_step=probe, use_cache=False)

    def _check(self, expected: torch.Tensor) -> None:
        """Cached chunks must give the plain forward's logits: whatever else the model keeps is lost."""
        device, dtype = self.model.device, self.model.dtype
        cache = BlockCache(
            self.cache_shape, num_blocks=1, block_size=len(_CHECKED_TOKENS), dtype=dtype, device=device
        )
        logits = torch.cat([self._checked_step(cache, first, last) for first, last in _CHUNKS])
        error = float((logits - expected).square().mean().sqrt() / expected.std())
        allowed = 1e-3 if dtype == torch.float32 else 5e-2
        if not error < allowed:
            raise ConfigError(
                f"{type(self.model).__name__} is not supported: over the block cache its logits are off by "
                f"{error:.2g} of their deviation (allowed: {allowed}); it keeps more than keys and values, "
                "or attends in its own way"
            )

    @torch.inference_mode()
    def _checked_step(self, cache: BlockCache, first: int, last: int) -> torch.Tensor:
        tokens, places = (
            torch.tensor(each[first:last], device=self.model.device)
            for each in (_CHECKED_TOKENS, range(len(_CHECKED_TOKENS)))
        )
        rows = SequenceRows(0, last - first, first, [0])
        return self(Step(tokens, places, AttentionStep((rows,), cache), None)).logits

    def __call__(self, step: Step) -> ForwardOutput:
        positions, device = step.positions, step.token_ids.device
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=device)
        rows = slice(0, len(step.token_ids)) if step.logit_rows is None else step.logit_rows
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=device)
        output = self.model(
            input_ids=step.token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            attention_step=_CachedAttention(step.attention, self._places),
            output_hidden_states=self._tap.is_wanted,
        )
        return ForwardOutput(output.logits[0].float(), self._tap.take(output.hidden_states))


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel) -> torch.Tensor:
    try:
        logits: torch.Tensor = model(
            torch.tensor([_CHECKED_TOKENS], device=model.device), use_cache=False
        ).logits[0]
    except Exception as error:  # Of sizes that do not fit each other, as heads and kv heads.
        raise ConfigError(
            f"{type(model).__name__} is not supported: its forward fails ({first_line(error)})"
        ) from None
    return logits


class _Tap:
    """Picks layers out of the hidden states, whose last one the library gives after the final norm only.

    Args:
        layers: as ``step.ForwardOutput`` numbers them.

    Raises:
        ConfigError: the model has no list of layers whose last one could be watched.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._num_layers = int(model.config.get_text_config().num_hidden_layers) if layers else 0
        self._last: torch.Tensor | None = None
        if self._num_layers in layers:
            self._last_layer(model).register_forward_hook(self._keep)

    @property
    def is_wanted(self) -> bool:
        """Any layer is."""
        return bool(self._layers)

    def take(self, hidden_states: tuple[torch.Tensor, ...] | None) -> dict[int, torch.Tensor] | None:
        """Features of the forward that has just run; None where no layer is wanted."""
        if not self._layers:
            return None
        assert hidden_states is not None, "hidden states were asked for"
        found = dict(enumerate(hidden_states[:-1]))
        found[self._num_layers + 1] = hidden_states[-1]
        if self._last is not None:
            found[self._num_layers], self._last = self._last, None
        return {layer: found[layer][0] for layer in self._layers}

    def _last_layer(self, model: PreTrainedModel) -> torch.nn.Module:
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self._num_layers:
                return module[-1]
        raise ConfigError(
            f"{type(model).__name__} gives no features of layer {self._num_layers}: it has no list of "
            f"{self._num_layers} layers"
        )

    def _keep(self, module: torch.nn.Module, args: object, output: Any) -> None:
        self._last = output[0] if isinstance(output, tuple) else output


class _Probe:
    """Stands in for a step to learn what each layer would keep, on this rank, whatever the architecture."""

    def __init__(self) -> None:
        self._kept: dict[int, LayerShape] = {}

    def attend(self, layer: int, rows: _LayerRows) -> torch.Tensor:
        self._kept[layer] = rows.shape
        return rows.query.new_zeros(len(rows.query), rows.query.shape[1] * rows.value_dim)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape.of_layers([self._kept[layer] for layer in sorted(self._kept)])

    def places(self, model: str) -> dict[int, int]:
        """The place in the cache of each layer that called attention.

        Raises:
            ConfigError: none did, or some did not.
        """
        if not self._kept:
            raise ConfigError(
                f"{model} is not supported: its attention is code of its own, which cannot run over the cache"
            )
        if set(self._kept) != set(range(len(self._kept))):
            raise ConfigError(
                f"{model} is not supported: only its layers {sorted(self._kept)} keep keys and values; "
                "allowed: models of which every layer does"
            )
        return {layer: place for place, layer in enumerate(sorted(self._kept))}


def _block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_step: _Attention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention signature: ``[1, num_heads, num_rows, head_dim]`` in, rows before heads out."""
    layer = getattr(module, "layer_idx", None)
    if sliding_window is None and layer is not None:
        sliding_window = _window_of_kind(module, layer)
    refused = f"{type(module).__name__} is not supported: "
    if attention_step is None or layer is None:
        raise ConfigError(f"{refused}it does not pass its arguments on to the attention function")
    if attention_mask is not None:
        raise ConfigError(f"{refused}its attention has a mask of its own")
    for name, words in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{refused}its attention has {words} ({name})")
    rows = _LayerRows(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        rule=None if softcap is None and s_aux is None else ScoreRule(softcap, s_aux),
    )
    if keeps_latents(module):
        output = _attend_latents(module, layer, rows, attention_step)
    else:
        output = attention_step.attend(layer, rows)
    return output.view(1, query.shape[2], query.shape[1], -1), None


def _attend_latents(
    module: torch.nn.Module, layer: int, rows: _LayerRows, attention_step: _Attention
) -> torch.Tensor:
    """Attends where the keys are latents, and the values the rotated part of keys."""
    latent_dim = rows.key.shape[2]
    stored = torch.cat((rows.key, rows.value), dim=2)
    inner = replace(
        rows,
        query=to_latent(module, rows.query),
        key=stored,
        value=stored[:, :, :0],
        latent_dim=latent_dim,
    )
    attended = attention_step.attend(layer, inner)
    return from_latent(module, attended.view(len(stored), -1, latent_dim))


def _window_of_kind(module: torch.nn.Module, layer: int) -> int | None:
    """The window of a layer that leaves it to the mask, as Qwen2-MoE's do: by the kind of the layer."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if layer >= len(kinds) or kinds[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
