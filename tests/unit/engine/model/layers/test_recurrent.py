"""A recurrent layer sees the rows of each sequence behind its own state, whatever a step mixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specray.engine.cache.blocks import BlockCache
from specray.engine.cache.states import LayerState
from specray.engine.model.layers.recurrent import LayerCache, RecurrentLayers
from specray.engine.step import AttentionStep, CacheShape, SequenceRows
from specray.errors import ConfigError


class Sums(torch.nn.Module):
    """Adds up all rows of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> torch.Tensor:
        assert "attention_step" not in kwargs, "kernels of the library take no arguments of ours"
        self.shapes.append((hidden_states.shape[0], hidden_states.shape[1]))
        before = None if cache_params is None else cache_params.get_recurrent_state(0)
        sums = hidden_states.cumsum(1) + (0 if before is None else before[:, None])
        if cache_params is not None:
            cache_params.update_recurrent_state(sums[:, -1], 0)
        return sums


def make_layer() -> tuple[Sums, RecurrentLayers, BlockCache]:
    module, device = Sums(), torch.device("cpu")
    shape = CacheShape(1, 1, 1)
    cache = BlockCache(
        shape, num_blocks=4, block_size=16, dtype=torch.float32, device=device, num_state_slots=4
    )
    return module, RecurrentLayers([module]), cache


def run(module: Sums, layers: RecurrentLayers, cache: BlockCache, *parts: tuple[Any, ...]) -> list[float]:
    """Rows of some sequences: of each its block, its start, its values, and how many of them are open."""
    rows: list[SequenceRows] = []
    values: list[float] = []
    for block, start, new, *num_open in parts:
        rows.append(SequenceRows(len(values), len(new), start, [block], (), block, *num_open))
        values += new
    hidden = torch.tensor(values)[None, :, None]
    with layers.over(AttentionStep(tuple(rows), cache)):
        output = module(hidden, attention_step="a step", cache_params=None)
    found: list[float] = output[0, :, 0].tolist()
    return found


def test_sequences_of_a_step_do_not_mix() -> None:
    module, layers, cache = make_layer()
    assert run(module, layers, cache, (0, 0, [1.0, 2.0]), (1, 0, [10.0])) == [1, 3, 10]
    assert run(module, layers, cache, (1, 1, [20.0, 30.0]), (0, 2, [4.0])) == [30, 60, 7]


def test_rows_of_equal_length_are_one_batch() -> None:
    module, layers, cache = make_layer()
    run(module, layers, cache, (0, 0, [1.0]), (1, 0, [2.0, 2.0]), (2, 0, [3.0]))
    module.shapes.clear()
    assert run(module, layers, cache, (0, 1, [1.0]), (1, 2, [1.0]), (2, 1, [1.0])) == [2, 5, 4]
    assert module.shapes == [(3, 1)]


def test_a_sequence_that_begins_is_no_batch_with_one_that_goes_on() -> None:
    module, layers, cache = make_layer()
    run(module, layers, cache, (0, 0, [1.0]))
    assert run(module, layers, cache, (0, 1, [1.0]), (1, 0, [5.0])) == [2, 5]


def test_rows_behind_refused_ones_go_on_from_the_settled_ones() -> None:
    module, layers, cache = make_layer()
    run(module, layers, cache, (0, 0, [1.0, 1.0]))
    module.shapes.clear()
    assert run(module, layers, cache, (0, 2, [1.0, 50.0, 50.0], 2)) == [3, 53, 103]
    assert module.shapes == [(1, 1), (1, 2)]
    assert [cache.states.resume_len(0, length) for length in (2, 3, 4, 5)] == [0, 3, 3, 5]
    assert run(module, layers, cache, (0, 3, [1.0])) == [4]


def test_a_step_that_fails_leaves_the_settled_state() -> None:
    module, layers, cache = make_layer()
    run(module, layers, cache, (0, 0, [1.0, 1.0]))
    rows = SequenceRows(0, 1, 2, [0])
    with pytest.raises(RuntimeError, match="lost"), layers.over(AttentionStep((rows,), cache)):
        module(torch.ones(1, 1, 1))
        raise RuntimeError("lost")
    assert run(module, layers, cache, (0, 2, [1.0])) == [3]


def test_a_forward_outside_of_steps_is_the_library_s_own() -> None:
    module = Sums()
    RecurrentLayers([module])
    own = LayerCache(LayerState())
    assert module(torch.ones(1, 3, 1), own).flatten().tolist() == [1, 2, 3]
    assert float(own.state.recurrent[0]) == 3


def test_first_inputs_of_a_convolution_stand_behind_zeros() -> None:
    cache = LayerCache(LayerState())
    joined = cache.update_conv_state(torch.tensor([[[1.0, 2.0]]]), 0, conv_kernel_size=4)
    assert joined.tolist() == cache.state.conv[0].tolist() == [[[0, 0, 1, 2]]]
    joined = cache.update_conv_state(torch.tensor([[[3.0]]]), 0, conv_kernel_size=4)
    assert joined.tolist() == [[[0, 0, 1, 2, 3]]]
    assert cache.state.conv[0].tolist() == [[[0, 1, 2, 3]]]


def test_a_module_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is not supported: it takes the cache of its states in"):
        RecurrentLayers([torch.nn.Linear(1, 1)])
