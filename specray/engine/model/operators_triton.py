"""The work between a layer's matrix products, as Triton kernels. Importing it needs triton.

A captured forward of few rows still pays some microseconds for every operator: the activation of a gated pair
is one here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cache.state_pool import LayerStates, StatePool
from specray.engine.cuda.recurrent.chunks_triton import absorb
from specray.engine.cuda.recurrent.heads_triton import DeltaGates, keep, mix
from specray.engine.cuda.recurrent.step_triton import advance
from specray.engine.cuda.tiles import FREE, TileRule
from specray.engine.model.layers.delta import GatedDelta, Mixer
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.triton import TritonExperts
from specray.engine.model.layers.mixer_lowering import PlainMixer
from specray.engine.model.layers.recurrences import HeadRows
from specray.engine.model.linear import Gate, JoinedGate, PlainLinear
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.step import SequenceRows, StateShape
from specray.engine.weights.stored_weight import Weight, numbers_of

_log = logging.getLogger(__name__)

_COLUMNS = 1024
_NUM_ROWS = 8
"""Rows that a layer's kernels compute beside its plain form, before they are trusted."""


@triton.jit
def _activate(both, out, size, HAS_TANH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    gate = tl.load(both + row * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + column, mask=is_column, other=0.0).to(tl.float32)
    exponent = gate
    if HAS_TANH:
        # As in ``cpu.gemm.epilogue``: twice the hyperbolic tangent's argument.
        exponent = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    product = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=is_column)


class TritonGate(JoinedGate):
    """A gated pair whose activation is one kernel."""

    __slots__ = ()

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        num_rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(num_rows, size, dtype=both.dtype, device=both.device)
        _activate[(num_rows, triton.cdiv(size, _COLUMNS))](
            both, out, size, HAS_TANH=self.joint is Activation.GELU_TANH, COLUMNS=_COLUMNS
        )
        return out


@dataclass(frozen=True, slots=True)
class TritonDelta:
    """Implements ``layers.delta.Mixer``: three kernels, and two more where there are rows of prompts."""

    plain: GatedDelta

    @property
    def shape(self) -> StateShape:
        return self.plain.shape

    @property
    def can_be_captured(self) -> bool:
        return True

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        shape, plain, layer = self.shape, self.plain, pool.layers[place]
        num_keys, num_values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
        logs, decays, rates = torch.empty(
            3, len(projected), shape.num_heads, dtype=torch.float32, device=projected.device
        )
        gates = DeltaGates(
            plain.decay_rates,
            plain.decay_bias,
            plain.rate_scale,
            logs,
            decays,
            rates,
            at=shape.num_channels + num_values,
        )
        mixed = mix(
            projected,
            plain.taps,
            None,
            layer.inputs,
            pool.table,
            key_dim=shape.key_dim,
            num_normed=shape.num_key_heads,
            gates=gates,
        )
        queries, keys, values = torch.split(mixed, [num_keys, num_keys, num_values], -1)
        heads = HeadRows(
            queries.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            keys.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            values.unflatten(-1, (shape.num_heads, shape.value_dim)),
            logs[..., None],
            rates,
        )
        out = recurred(heads, decays[..., None], layer, pool)
        records = layer.updates, layer.decays, layer.keys
        return keep(
            projected,
            out,
            heads.keys,
            decays[..., None],
            layer.inputs,
            records,
            pool.table,
            plain.norm,
            plain.eps,
        )


def recurred(heads: HeadRows, decays: torch.Tensor, layer: LayerStates, pool: StatePool) -> torch.Tensor:
    """What a recurrence answers to all rows of a step; ``heads_triton.keep`` is to follow.

    Args:
        decays: exponentials of the log decays, of the same shape.

    Returns:
        Float32 ``[num_rows, num_heads, value_dim]``; padding is not written.
    """
    out = torch.empty(heads.values.shape, dtype=torch.float32, device=decays.device)
    records = layer.updates, layer.decays, layer.keys
    both = heads.queries, heads.keys, heads.values
    if pool.has_settled_rows and (chunks := pool.chunks) is not None:
        absorb(*both, heads.log_decays, heads.rates, out, layer.states, records, *chunks)
    advance(*both, decays, heads.rates, out, layer.states, records, pool.table)
    return out


class TritonOperators(TorchOperators):
    """Implements ``operators.Operators`` on CUDA."""

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        if isinstance(joint, Clamp):
            return super().gate(gate, up, gate_bias, up_bias, joint)
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        both = [numbers_of(weight, self.dtype) for weight in (gate, up)]
        return TritonGate(PlainLinear(torch.cat(both), bias), joint)

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        return expert_layer(router, experts, self.dtype) or super().experts(router, experts)

    def mixer(self, mixer: PlainMixer) -> Mixer:
        return delta_mixer(mixer, self.dtype)


def expert_layer(
    router: Router, experts: Sequence[ExpertMlp], dtype: torch.dtype, rule: TileRule = FREE
) -> ExpertLayer | None:
    """A layer of experts in kernels; None: they are of kinds that these do not know, or do not work here."""
    made = TritonExperts.of(experts, rule)
    if made is None:
        return None
    device, generator = made.gate.parts[0][0].weight.device, torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS, experts[0].gate.in_features, generator=generator).to(device, dtype)
    order = torch.rand(_NUM_ROWS, len(experts), generator=generator).argsort(-1)
    chosen = order[:, : router.routing.num_chosen].contiguous().to(device)
    weights = torch.full(chosen.shape, 1 / chosen.shape[1], device=device)
    in_turn = ExpertsInTurn(experts)
    if not works("experts", lambda: made(rows, chosen, weights), lambda: in_turn(rows, chosen, weights)):
        return None
    return ExpertLayer(router, made)


def delta_mixer(mixer: PlainMixer, dtype: torch.dtype) -> Mixer:
    """The layer in kernels; the layer itself where they do not work here, or do not know its kind."""
    if not isinstance(mixer, GatedDelta) or mixer.shape.gate_dim > 1 or mixer.has_sigmoid:
        return mixer
    made, shape, device = TritonDelta(mixer), mixer.shape, mixer.taps.device
    width = shape.num_channels + shape.num_heads * (shape.value_dim + 2)
    rows = torch.randn(_NUM_ROWS, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def run(each: Mixer) -> torch.Tensor:
        """Runs a prompt, whose first rows settle at once, and verifies of which some rows stay."""
        pool = StatePool([shape], num_slots=1, max_open=4, dtype=dtype, device=device)
        outputs = []
        for start, end, num_open in ((0, 5, 2), (4, 7, 3), (6, _NUM_ROWS, 2)):
            with pool.step([SequenceRows(0, end - start, start, (), num_open=num_open)]):
                outputs.append(each(rows[start:end], pool, 0))
        return torch.cat(outputs)

    return made if works("recurrent layers", lambda: run(made), lambda: run(mixer)) else mixer


@torch.inference_mode()
def works(what: str, kernels: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor]) -> bool:
    """Whether kernels give the numbers of the plain form of the same; if not, the log says why.

    Args:
        what: the part that they compute.
    """
    try:
        found, expected = kernels(), plain()
        tolerance = 1e-3 if found.dtype == torch.float32 else 2e-2
        off = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not off < tolerance:
            raise ArithmeticError(f"their numbers are off by {float(off):.2g}; allowed: {tolerance}")
    # Whatever a compiler or a driver raises: there is another way.
    except Exception as error:
        _log.warning("%s run with torch's operators: %s: %s", what, type(error).__name__, error)
        return False
    return True


@torch.inference_mode()
def check_gate(device: torch.device, dtype: torch.dtype) -> None:
    """Compares activations of a few numbers with torch's. Raises ArithmeticError where the results differ."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(size, generator=generator).to(device=device, dtype=dtype)
        for size in ((2 * (_COLUMNS + 8), 16), (3, 16))
    )
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for activation in Activation:
        both = PlainLinear(weight, None)
        output, expected = (kind(both, activation)(rows).float() for kind in (TritonGate, JoinedGate))
        error = float(((output - expected).abs() / (1.0 + expected.abs())).max())
        if not error < tolerance:
            raise ArithmeticError(f"its numbers are off by {error:.2g}; allowed: {tolerance}")
