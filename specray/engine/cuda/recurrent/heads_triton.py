"""What lies around a recurrence: convolution, norms and gates before it, outputs and records behind it.

Triton kernels; importing it needs triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.cuda.recurrent.table_triton import (
    FIRST_ROW,
    NUM_COLUMNS,
    NUM_OPEN,
    SETTLED,
    SLOT,
    START,
    owner_of,
)

_NORM_EPS = tl.constexpr(1e-6)
_BLOCK = 128
"""Channels of a program of the convolution, where no norm asks for others."""


@triton.jit(do_not_specialize=["num_sequences"])
def _mix(
    rows, inputs, taps, bias, mixed, decay_rates, decay_bias, log_decays, decays, rates, table,
    num_sequences, row_stride, rate_scale, query_scale,
    NUM_CHANNELS: tl.constexpr, NUM_TAPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATES_AT: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    owner = owner_of(row, table, num_sequences, SEQUENCES)
    if owner >= 0:
        source = rows + row.to(tl.int64) * row_stride
        if block < NUM_BLOCKS:
            place = table + owner * NUM_COLUMNS
            slot, start = tl.load(place + SLOT).to(tl.int64), tl.load(place + START)
            opened = tl.maximum(start, tl.load(place + SETTLED))
            position = opened + row - tl.load(place + FIRST_ROW)
            offset = tl.arange(0, WIDTH)
            channel = block * BLOCK + offset
            is_channel = (offset < BLOCK) & (channel < NUM_CHANNELS)
            total = tl.zeros([WIDTH], tl.float32)
            for tap in tl.static_range(NUM_TAPS):
                back = NUM_TAPS - 1 - tap
                before = position - back
                # Masks of vectors alone: the interpreter cannot join one with a single truth.
                num_near = tl.where(before >= start, NUM_CHANNELS, 0)
                num_far = tl.where((before >= 0) & (before < start), NUM_CHANNELS, 0)
                kept = inputs + (slot * ROOM + tl.maximum(before, 0) % ROOM) * NUM_CHANNELS
                near = tl.load(
                    source - back * row_stride + channel, mask=is_channel & (channel < num_near), other=0.0
                )
                far = tl.load(kept + channel, mask=is_channel & (channel < num_far), other=0.0)
                weight = tl.load(taps + tap * NUM_CHANNELS + channel, mask=is_channel, other=0.0)
                total = tl.fma((near + far).to(tl.float32), weight, total)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=is_channel, other=0.0)
            total = total / (1.0 + tl.exp(-total))
            if block < NUM_NORMED:
                factor = 1.0 / tl.sqrt(tl.sum(total * total, 0) + _NORM_EPS)
                total *= tl.where(block < NUM_NORMED // 2, factor * query_scale, factor)
            tl.store(mixed + row.to(tl.int64) * NUM_CHANNELS + channel, total, mask=is_channel)
        else:
            head = tl.arange(0, HEADS)
            is_head = head < NUM_HEADS
            own = row.to(tl.int64) * NUM_HEADS + head
            b = tl.load(source + GATES_AT + head, mask=is_head, other=0.0).to(tl.float32)
            tl.store(rates + own, rate_scale / (1.0 + tl.exp(-b)), mask=is_head)
            # In float64: of a state that hardly fades, the last bits of 1 - decay count for all its tokens.
            a = tl.load(source + GATES_AT + NUM_HEADS + head, mask=is_head, other=0.0).to(tl.float64)
            a += tl.load(decay_bias + head, mask=is_head, other=0.0).to(tl.float64)
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            log_decay = -tl.load(decay_rates + head, mask=is_head, other=0.0).to(tl.float64) * softplus
            tl.store(log_decays + own, log_decay.to(tl.float32), mask=is_head)
            tl.store(decays + own, tl.exp(log_decay).to(tl.float32), mask=is_head)


@triton.jit(do_not_specialize=["num_sequences"])
def _keep(
    rows, outputs, norm, out, inputs, decays, kept_decays, keys, kept_keys, table,
    num_sequences, row_stride, key_stride, eps,
    NUM_CHANNELS: tl.constexpr, ROOM: tl.constexpr, MAX_OPEN: tl.constexpr, NUM_HEADS: tl.constexpr,
    SHARED: tl.constexpr, NUM_KEPT_KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    GATE_DIM: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    owner = owner_of(row, table, num_sequences, SEQUENCES)
    own, value = row.to(tl.int64) * NUM_HEADS + head, tl.arange(0, VALUES)
    is_value = value < VALUE_DIM
    if owner < 0:
        # Nobody's rows are numbers, too: what follows may choose by them.
        tl.store(out + own * VALUE_DIM + value, tl.zeros([VALUES], out.dtype.element_ty), mask=is_value)
    else:
        place = table + owner * NUM_COLUMNS
        slot = tl.load(place + SLOT).to(tl.int64)
        opened = tl.maximum(tl.load(place + START), tl.load(place + SETTLED))
        first, count = tl.load(place + FIRST_ROW), tl.load(place + NUM_OPEN)
        position = opened + row - first
        source = rows + row.to(tl.int64) * row_stride
        if IS_GATED:
            output = tl.load(outputs + own * VALUE_DIM + value, mask=is_value, other=0.0)
            factor = 1.0 / tl.sqrt(tl.sum(output * output, 0) / VALUE_DIM + eps)
            normed = output * factor * tl.load(norm + value, mask=is_value, other=0.0)
            z = tl.load(source + NUM_CHANNELS + head * VALUE_DIM + value, mask=is_value, other=0.0)
            z = z.to(tl.float32)
            gated = normed * (z / (1.0 + tl.exp(-z)))
            tl.store(out + own * VALUE_DIM + value, gated.to(out.dtype.element_ty), mask=is_value)
        if position >= opened + count - ROOM:
            offset = tl.arange(0, WIDTH)
            channel = head * BLOCK + offset
            is_channel = (offset < BLOCK) & (channel < NUM_CHANNELS)
            kept = inputs + (slot * ROOM + position % ROOM) * NUM_CHANNELS + channel
            tl.store(kept, tl.load(source + channel, mask=is_channel, other=0.0), mask=is_channel)
        if position >= opened:
            at = slot * MAX_OPEN + position % MAX_OPEN
            gate = tl.arange(0, GATES)
            is_gate = gate < GATE_DIM
            decay = tl.load(decays + own * GATE_DIM + gate, mask=is_gate, other=0.0)
            tl.store(kept_decays + (at * NUM_HEADS + head) * GATE_DIM + gate, decay, mask=is_gate)
            number = head // (NUM_HEADS // NUM_KEPT_KEYS)
            if head % (NUM_HEADS // NUM_KEPT_KEYS) == 0:
                key = tl.arange(0, KEYS)
                known = tl.load(
                    keys + row.to(tl.int64) * key_stride + head // SHARED * KEY_DIM + key,
                    mask=key < KEY_DIM,
                    other=0.0,
                )
                tl.store(kept_keys + (at * NUM_KEPT_KEYS + number) * KEY_DIM + key, known, mask=key < KEY_DIM)


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """How heads of the gated delta rule decay and learn: ``layers.delta.GatedDelta`` has the names."""

    decay_rates: torch.Tensor  # [num_heads], float32
    decay_bias: torch.Tensor  # [num_heads], float32
    rate_scale: float
    log_decays: torch.Tensor  # [num_rows, num_heads, 1], float32: written, as the next two
    decays: torch.Tensor
    rates: torch.Tensor  # [num_rows, num_heads]
    at: int
    """Column of a row where the heads' rates of learning begin, before their decays."""


def mix(
    rows: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    table: torch.Tensor,
    *,
    key_dim: int = 0,
    num_normed: int = 0,
    gates: DeltaGates | None = None,
) -> torch.Tensor:
    """Convolves the rows of a step, each behind those of its sequence, and applies silu.

    Args:
        rows: ``[num_rows, ...]``: a row's channels are its first numbers.
        taps: ``[num_taps, num_channels]``, float32.
        inputs: kept of the rows before, ``[num_slots, room, num_channels]``; ``keep`` writes it.
        table: int32 ``[num_sequences, 6]``.
        key_dim: channels of one key, if some are normed.
        num_normed: keys, and as many queries before them, that are then divided by their length; queries by
            the root of ``key_dim``, too.
        gates: computed beside them; None: nothing.

    Returns:
        ``[num_rows, num_channels]``, float32; padding is not written.
    """
    num_rows, num_channels = len(rows), taps.shape[1]
    mixed = torch.empty(num_rows, num_channels, dtype=torch.float32, device=rows.device)
    block = key_dim if num_normed else _BLOCK
    num_blocks = triton.cdiv(num_channels, block)
    unused = taps
    _mix[(num_rows, num_blocks + (gates is not None))](
        rows, inputs, taps, unused if bias is None else bias, mixed,
        *((unused,) * 5 if gates is None else (
            gates.decay_rates, gates.decay_bias, gates.log_decays, gates.decays, gates.rates,
        )),
        table, len(table), rows.stride(0), 1.0 if gates is None else gates.rate_scale,
        key_dim**-0.5 if num_normed else 1.0,
        NUM_CHANNELS=num_channels, NUM_TAPS=len(taps), ROOM=inputs.shape[1], BLOCK=block,
        WIDTH=triton.next_power_of_2(block), NUM_BLOCKS=num_blocks, NUM_NORMED=2 * num_normed,
        HAS_BIAS=bias is not None, GATES_AT=0 if gates is None else gates.at,
        NUM_HEADS=1 if gates is None else len(gates.decay_rates),
        HEADS=1 if gates is None else triton.next_power_of_2(len(gates.decay_rates)),
        SEQUENCES=triton.next_power_of_2(len(table)), num_warps=1 if block <= 128 else 4,
    )  # fmt: skip
    return mixed


def keep(
    rows: torch.Tensor,
    outputs: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    inputs: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Keeps what later steps need of a step's rows, and norms and gates what the recurrence gave.

    Args:
        rows: as for :func:`mix`; gates of outputs lie behind the channels.
        outputs: of the recurrence, float32 ``[num_rows, num_heads, value_dim]``.
        keys: as for ``step_triton.advance``, as decays, records and table.
        norm: ``[value_dim]``, float32; None: outputs are neither normed nor gated.
        eps: added to a mean of squares.

    Returns:
        Outputs in the rows' type, ``[num_rows, num_heads * value_dim]``, 0 in padding; without a norm the
        given ones with such padding.
    """
    num_rows, num_heads, value_dim = outputs.shape
    _, kept_decays, kept_keys = records
    num_key_heads, key_dim = keys.shape[1:]
    num_channels, gate_dim = inputs.shape[2], decays.shape[2]
    out = outputs.flatten(1)
    if norm is not None:
        out = torch.empty(out.shape, dtype=rows.dtype, device=rows.device)
    block = triton.cdiv(num_channels, num_heads)
    _keep[(num_rows, num_heads)](
        rows, outputs, decays if norm is None else norm, out, inputs, decays, kept_decays, keys, kept_keys,
        table, len(table), rows.stride(0), keys.stride(0), eps,
        NUM_CHANNELS=num_channels, ROOM=inputs.shape[1], MAX_OPEN=kept_keys.shape[1], NUM_HEADS=num_heads,
        SHARED=num_heads // num_key_heads, NUM_KEPT_KEYS=kept_keys.shape[2], KEY_DIM=key_dim,
        VALUE_DIM=value_dim, GATE_DIM=gate_dim, IS_GATED=norm is not None, BLOCK=block,
        WIDTH=triton.next_power_of_2(block), KEYS=triton.next_power_of_2(key_dim),
        VALUES=triton.next_power_of_2(value_dim), GATES=triton.next_power_of_2(gate_dim),
        SEQUENCES=triton.next_power_of_2(len(table)), num_warps=1,
    )  # fmt: skip
    return out
