"""The decoder written for speed: Llama and its kin over the block cache.

RMS norm, rotary positions, grouped attention with optional biases and q/k norms, a gated MLP or several;
layers that keep a state in the place of attention.
Everything that a layer needs is prepared once (see ``lowering``); a forward is a straight line of few, large
operators, because at one row a draft's step is 0.2 ms and each operator costs 1 to 10 us besides its work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from specray.engine.attention.base import Attention, HeadNorm
from specray.engine.cache.state_pool import StatePool
from specray.engine.model.layers.delta import DeltaInputs, Mixer
from specray.engine.model.layers.experts.hits import ExpertHits
from specray.engine.model.layers.experts.layer import ExpertLayer
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.layers.experts.shortcut import Shortcut
from specray.engine.model.layers.latent.projections import LatentOutput, LatentQueries
from specray.engine.model.layers.normed import Absent, NormedProjection, NormedQueries, Rows
from specray.engine.model.linear import Linear, Weights
from specray.engine.step import CacheShape, ForwardOutput, Step

_AROUND_LINEAR = NormedProjection | NormedQueries | LatentOutput | DeltaInputs
"""Kinds of projections that have a linear layer."""


class Norm(Protocol):
    """RMS norm over the last dimension of ``[num_rows, size]``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """``norm(rows) + summand``, whose contents may be lost."""
        ...


class Embedding(Protocol):
    """Token ids ``[num_rows]`` to hidden states ``[num_rows, hidden_size]``."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...


class Projection(Protocol):
    """Back to the residual stream: ``linear(rows) + residual``."""

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """The contents of ``summand`` may be lost."""
        ...


class OutputHead(Protocol):
    """Hidden states ``[num_rows, hidden_size]`` to float32 logits over the whole vocabulary."""

    def precise(self, rows: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class WritingHead(Protocol):
    """A head that writes its logits where they are wanted."""

    def precise_into(self, rows: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019)."""

    weight: torch.Tensor  # [size]
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self.eps)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return summand.add_(self(rows))


@dataclass(frozen=True, slots=True)
class WideRMSNorm(RMSNorm):
    """RMS norm with a float32 weight, for rows of another type."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(rows.dtype)


@runtime_checkable
class RowGate(Protocol):
    """``attended * sigmoid(linear(rows))``, of rows of the residual stream and what is attended to.

    Each of the linear layer's numbers is of as many that follow each other.
    """

    def __call__(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The contents of ``attended`` are lost."""
        ...

    @property
    def linear(self) -> Linear: ...

    def with_linear(self, linear: Linear) -> RowGate:
        """The same of another linear layer."""
        ...


@dataclass(frozen=True, slots=True)
class SigmoidGate:
    """Implements :class:`RowGate` with torch's operators."""

    linear: Linear

    def __call__(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        gates = self.linear(rows).sigmoid_()
        attended.view(*gates.shape, -1).mul_(gates[..., None])
        return attended

    def with_linear(self, linear: Linear) -> SigmoidGate:
        return replace(self, linear=linear)


@dataclass(frozen=True, slots=True)
class RecurrentPart:
    """What a layer does beside attention, to the same rows: it keeps a state."""

    linear: Rows
    """All that the mixer takes."""
    mixer: Mixer
    output: Projection
    place: int
    """Place of its state among all states."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer's weights on this rank; parts that it has not are ``normed.Absent``."""

    input_norm: Norm
    qkv: Rows
    """Queries, keys and values; of a recurrent layer all that its mixer takes."""
    head_norm: HeadNorm | None
    output: Projection
    post_attention_norm: Norm
    gate: Callable[[torch.Tensor], torch.Tensor]
    """A ``linear.Gate``, or a layer of experts in its place."""
    down: Projection
    window: int | None
    sinks: torch.Tensor | None = None
    """Score of each query head's sink, ``[num_heads]``, float32; None: there are none."""
    output_gate: RowGate | None = None
    """Gate of what is attended to; None: there is none."""
    mixer: Mixer | None = None
    """What a recurrent layer does in the place of attention; None: it attends."""
    place: int = 0
    """Place of its keys and values among those of all layers that attend; of its state, among all states."""
    beside: RecurrentPart | None = None
    """What it does beside attention; None: nothing."""
    shortcut: Shortcut | None = None
    """Experts beside its MLP, for the stream behind the next layer; None: there are none."""

    @property
    def routed(self) -> ExpertLayer | None:
        """Its experts among which a router chooses; None: it has none."""
        kind = self.shortcut or self.gate
        kind = kind.experts if isinstance(kind, Shortcut | WithSharedMlp) else kind
        return kind if isinstance(kind, ExpertLayer) else None

    def counting(self, hits: torch.Tensor) -> DecoderLayer:
        """The layer, whose experts write to ``hits`` how many are hit, ``[1]``, int32."""
        assert self.routed is not None, "it has experts"
        routed = replace(self.routed, hits=hits)
        if self.shortcut is not None:
            return replace(self, shortcut=replace(self.shortcut, experts=routed))
        if isinstance(self.gate, WithSharedMlp):
            return replace(self, gate=replace(self.gate, experts=routed))
        return replace(self, gate=routed)

    @property
    def mixers(self) -> list[Mixer]:
        """What keeps states."""
        beside = None if self.beside is None else self.beside.mixer
        return [each for each in (self.mixer, beside) if each is not None]


@dataclass(frozen=True, slots=True)
class DecoderForward:
    """The decoder."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: OutputHead
    attention: Attention
    cache_shape: CacheShape
    feature_layers: tuple[int, ...] = ()
    """Layers whose input is part of the output; ``step.ForwardOutput`` says what numbers mean."""
    expert_hits: ExpertHits | None = None
    """Counts the experts that a forward hits; None: there are none."""
    keeps_residuals: bool = False
    """True if projections leave their summand as it is, so that features need no copy."""
    residual_scale: float = 1.0
    """Number by which the model's residual stream is divided here."""
    logit_scale: float = 1.0
    """Factor of what the last norm gives here. Features have neither."""
    embedding_scale: float = 1.0
    """Factor of the rows here that the model has after its embedding."""

    @property
    def name(self) -> str:
        return "decoder"

    @property
    def has_late_features(self) -> bool:
        """Some are after the last layer, which must then compute all rows."""
        return any(layer >= len(self.layers) for layer in self.feature_layers)

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward of one shape always runs the same operators."""
        experts = (layer.routed for layer in self.layers)
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return all(mixer.can_be_captured for mixer in mixers) and all(
            each.can_be_captured for each in experts if each is not None
        )

    @property
    def is_recurrent(self) -> bool:
        """Some layers keep states."""
        return bool(self.cache_shape.states)

    def linears(self) -> list[Weights]:
        """Linear layers of this rank, without those of groups and experts, in the forward's order."""
        kinds: list[object] = []
        for layer in self.layers:
            qkv = layer.qkv.linears if isinstance(layer.qkv, LatentQueries) else (layer.qkv,)
            beside = () if layer.beside is None else (layer.beside.linear, layer.beside.output)
            kinds += [
                kind.linear if isinstance(kind, _AROUND_LINEAR) else kind
                for kind in (*qkv, layer.output, *beside, layer.gate, layer.down)
            ]
        return [kind for kind in (*kinds, self.head) if isinstance(kind, Weights)]

    def __call__(self, step: Step) -> ForwardOutput:
        with self.stepping(step):
            return self.decode(self.embedding(step.token_ids), step)

    def stepping(self, step: Step) -> AbstractContextManager[None]:
        """What the states need around a forward."""
        if not self.is_recurrent:
            return nullcontext()
        batch = step.attention.batch
        if batch is None:
            return states_of(step).step(step.attention.rows)
        assert batch.states is not None, "who describes a step in tensors begins it"
        return states_of(step).described_by(batch.states)

    def decode(self, hidden: torch.Tensor, step: Step) -> ForwardOutput:
        """Computes the output from the embedded tokens, ``[num_rows, hidden_size]``."""
        features: dict[int, torch.Tensor] | None = {} if self.feature_layers else None
        attention = self.attention.prepare(step.attention, step.positions)
        last = len(self.layers) - 1
        shortcut: Shortcut | None = None
        added: torch.Tensor | None = None
        is_cut = step.logit_rows is not None and not self.has_late_features
        for index, layer in enumerate(self.layers):
            if features is not None and index in self.feature_layers:
                is_safe = self.keeps_residuals or self.residual_scale != 1.0
                features[index] = _scaled(hidden if is_safe else hidden.clone(), self.residual_scale)
            rows = layer.input_norm(hidden)
            qkv = layer.qkv(rows)
            if isinstance(layer.qkv, Absent):
                attended = rows
            elif layer.mixer is not None:
                attended = states_of(step).run(layer.mixer, qkv, layer.place)
            else:
                attended = attention.attend(layer.place, qkv, layer.head_norm, layer.window, layer.sinks)
            if layer.output_gate is not None:
                attended = layer.output_gate(rows, attended)
            beside, other = layer.beside, None
            if beside is not None:
                other = states_of(step).run(beside.mixer, beside.linear(rows), beside.place)
            if index == last and is_cut and step.logit_rows is not None:
                # Nothing after the last attention is needed of rows whose logits nobody wants.
                attended, hidden = attended[step.logit_rows], hidden[step.logit_rows]
                other = None if other is None else other[step.logit_rows]
                added = None if added is None else added[step.logit_rows]
            hidden = layer.output.plus(attended, hidden)
            if beside is not None and other is not None:
                hidden = beside.output.plus(other, hidden)
            rows = layer.post_attention_norm(hidden)
            hidden = layer.down.plus(layer.gate(rows), hidden)
            if shortcut is not None and added is not None:
                hidden = shortcut.output.plus(added, hidden)
            shortcut = layer.shortcut
            added = None if shortcut is None else shortcut(rows)
        normed = self.final_norm(hidden)
        if features is not None and self.has_late_features:
            stream = _scaled(hidden, self.residual_scale)
            late = {last + 1: stream, last + 2: _scaled(normed, 1.0 / self.logit_scale)}
            features |= {layer: rows for layer, rows in late.items() if layer in self.feature_layers}
            if step.logit_rows is not None:
                normed = normed[step.logit_rows]
        return ForwardOutput(_logits(self.head, normed, step.logits), features)


def states_of(step: Step) -> StatePool:
    """The states of recurrent layers beside the step's keys and values."""
    states = step.attention.cache.states
    assert isinstance(states, StatePool), "recurrent layers have a pool"
    return states


def _logits(head: OutputHead, rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return head.precise(rows)
    if isinstance(head, WritingHead):
        head.precise_into(rows, out)
        return out
    return out.copy_(head.precise(rows))


def _scaled(rows: torch.Tensor, factor: float) -> torch.Tensor:
    return rows if factor == 1.0 else rows * factor
