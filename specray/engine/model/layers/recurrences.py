"""Linear recurrences with torch's operators: states of several heads that forget, learn and answer.

Of each token a head has a key and a query ``[key_dim]``, a value ``[value_dim]``, and a decay. In float32::

    state = decay * state                          [key_dim, value_dim]
    update = rate * (value - state^T key)          the delta rule; elsewhere the value itself
    state = state + key update^T,   output = state^T query

The delta rule: Yang et al., *Gated Delta Networks* (2024), where a head's decay is a number; *Kimi Linear*
(2025), where it is one for each of a key's numbers. Without it: Dao and Gu, *Transformers are SSMs* (2024),
whose C and B are query and key. ``advance`` computes token by token, and keeps records; ``absorb`` chunk by
chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specray.engine.cache.state_pool import LayerStates, StatePool, StateRows, for_heads, learned
from specray.engine.cache.state_slots import STATE_UNIT


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What the heads have of some rows, float32."""

    queries: torch.Tensor  # [num_rows, num_key_heads, key_dim]
    keys: torch.Tensor  # [num_rows, num_key_heads, key_dim]
    values: torch.Tensor  # [num_rows, num_heads, value_dim]
    log_decays: torch.Tensor  # [num_rows, num_heads, gate_dim], 0 or less
    rates: torch.Tensor | None  # [num_rows, num_heads]; None: no delta rule

    def __getitem__(self, rows: slice) -> HeadRows:
        rates = None if self.rates is None else self.rates[rows]
        return HeadRows(self.queries[rows], self.keys[rows], self.values[rows], self.log_decays[rows], rates)


def by_sequence(
    run: Callable[[torch.Tensor, LayerStates, StateRows], torch.Tensor],
    projected: torch.Tensor,
    pool: StatePool,
    place: int,
    size: int,
) -> torch.Tensor:
    """What a mixer makes of each sequence's rows, ``[num_rows, size]``; ``place`` is the layer's."""
    out = projected.new_empty(len(projected), size)
    for item in pool.rows:
        rows = slice(item.first_row, item.first_row + item.end - item.start)
        out[rows] = run(projected[rows], pool.layers[place], item)
    return out


def recur(heads: HeadRows, layer: LayerStates, item: StateRows, out: torch.Tensor) -> None:
    """Runs a sequence's rows of a step.

    Args:
        heads: of the rows.
        out: written to, ``[num_rows, num_heads, value_dim]``.
    """
    state = layer.replayed(item.slot, item.base, min(item.start, item.settled))
    middle = item.opened - item.start
    if middle:
        state, out[:middle] = absorb(heads[:middle], state, item.start)
    if item.settled > item.base:
        layer.states[item.slot] = state
    state = layer.relearned(state, item.slot, item.settled, item.start)
    advance(heads[middle:], state, layer, item, out[middle:])


def advance(
    heads: HeadRows, state: torch.Tensor, layer: LayerStates, item: StateRows, out: torch.Tensor
) -> None:
    """Computes open rows one by one, and keeps their records."""
    size, count = layer.updates.shape[1], len(state)
    decays = heads.log_decays.exp()
    for row in range(len(heads.values)):
        key, query = (for_heads(each[row], count) for each in (heads.keys, heads.queries))
        state = state * decays[row, :, :, None]
        update = heads.values[row]
        if heads.rates is not None:
            update = (update - (state * key[:, :, None]).sum(1)) * heads.rates[row, :, None]
        state = learned(state, key, update)
        out[row] = (state * query[:, :, None]).sum(1)
        place = (item.opened + row) % size
        layer.updates[item.slot, place] = update
        layer.decays[item.slot, place] = decays[row]
        layer.keys[item.slot, place] = for_heads(heads.keys[row], layer.keys.shape[2])


def absorb(heads: HeadRows, state: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes rows chunk by chunk. Chunks end at multiples of ``STATE_UNIT`` tokens of the sequence.

    Within a chunk, the updates of the delta rule solve a triangular system (Yang et al., *Parallelizing
    Linear Transformers with the Delta Rule*, 2024). Every chunk is made up to one size with rows that change
    nothing, so that a prompt gives the same bits however it is cut at multiples of that size.

    Args:
        state: ``[num_heads, key_dim, value_dim]``.
        start: tokens before the rows.

    Returns:
        The state behind the rows, and their outputs, ``[num_rows, num_heads, value_dim]``.
    """
    num_rows, num_heads = heads.values.shape[:2]
    positions = torch.arange(start, start + num_rows, device=state.device)
    chunks = positions // STATE_UNIT - start // STATE_UNIT
    # A first chunk that begins in the middle is made up behind its rows, as a last one is.
    places = chunks * STATE_UNIT + torch.where(chunks == 0, positions - start, positions % STATE_UNIT)
    num_chunks = int(chunks[-1]) + 1

    def chunked(rows: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros(num_chunks * STATE_UNIT, *rows.shape[1:])
        padded[places] = rows
        return padded.view(num_chunks, STATE_UNIT, *rows.shape[1:]).transpose(1, 2)

    queries, keys = (chunked(for_heads(each, num_heads)) for each in (heads.queries, heads.keys))
    values, gates = chunked(heads.values), chunked(heads.log_decays).cumsum(-2)
    rates = None if heads.rates is None else chunked(heads.rates[..., None])
    outputs = []
    for chunk in range(num_chunks):
        each = queries[chunk], keys[chunk], values[chunk], gates[chunk]
        state, output = _absorb_chunk(*each, None if rates is None else rates[chunk], state)
        outputs.append(output)
    rows = torch.stack(outputs).transpose(1, 2).reshape(-1, *values.shape[1:2], values.shape[3])
    return state, rows[places]


def _absorb_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of all heads, ``[num_heads, STATE_UNIT, ...]`` each; gates are sums over the chunk so far."""
    faded, rest = gates.exp(), (gates[:, -1:] - gates).exp()
    updates = values
    if rates is not None:
        system = _products(keys, keys, gates).tril(-1) * rates
        known = torch.matmul(keys * faded, state)
        updates = torch.linalg.solve_triangular(
            system, (values - known) * rates, upper=False, unitriangular=True
        )
    output = torch.matmul(queries * faded, state)
    output = output + torch.matmul(_products(queries, keys, gates), updates)
    state = state * faded[:, -1, :, None] + torch.matmul((keys * rest).transpose(1, 2), updates)
    return state, output


def _products(first: torch.Tensor, second: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Dot products of rows with those up to themselves, which have faded since."""
    size = gates.shape[1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=gates.device).triu(1)
    # Masked before, since what rows behind would need is beyond all numbers.
    fading = (gates[:, :, None] - gates[:, None]).masked_fill(is_later[..., None], float("-inf")).exp()
    if gates.shape[2] == 1:
        return torch.matmul(first, second.transpose(1, 2)) * fading[..., 0]
    return torch.einsum("hic,hjc,hijc->hij", first, second, fading)
