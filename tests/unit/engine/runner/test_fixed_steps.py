"""The same bits in every step on a device: what is refused, and sizes that no step changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specray.config import DraftConfig, TargetConfig
from specray.engine.attention.paged import attend_gathered, store_rows
from specray.engine.attention.select import Backend, Model, fixed_part
from specray.engine.cuda.tiles import FIXED, FREE
from specray.engine.group.parallel import ParallelContext
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.description import ModelArgs
from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertsInTurn
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.linear import JoinedGate, PlainLinear
from specray.engine.model.loader import load_model
from specray.engine.model.operators import cuda_operators
from specray.engine.runner.determinism import chosen_backend, is_fixed, why_not
from specray.engine.step import HeadShape
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runners import cpu_runner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = HeadShape(32, 8, 128)


def test_parts_are_as_long_as_the_longest_sequence_needs_and_take_their_memory() -> None:
    assert [fixed_part(length) for length in (100, 16_384, 16_385, 131_072)] == [512, 512, 1024, 4096]
    backend = Backend("triton", attend_gathered, store_rows, 16, fixed_part=512)
    assert backend.part_bytes(HEADS, 512, 2048) == 0
    assert backend.part_bytes(HEADS, 4096, 2048) == 4 * 8 * 2048 * 32 * 129
    assert Backend("triton", attend_gathered, store_rows, 16).part_bytes(HEADS, 4096, 2048) == 0


def test_tiles_are_one_for_all_rows_only_where_they_are_fixed() -> None:
    for columns in (4096, 28_672):
        assert len({FIXED.tile(num_rows, columns) for num_rows in range(1, 65)}) == 1
        assert [FREE.tile(num_rows, columns).rows for num_rows in (1, 16, 17, 33, 65)] == [
            16,
            16,
            32,
            64,
            128,
        ]


def test_only_a_target_that_asks_for_it_is_slower_on_a_device() -> None:
    on = TargetConfig.model_validate({"deterministic": "on"})
    assert is_fixed(on, CUDA) and not is_fixed(on, CPU)
    assert not is_fixed(TargetConfig.model_validate({}), CUDA)
    assert not is_fixed(DraftConfig.model_validate({}), CUDA)


@pytest.mark.parametrize("attention", ["varlen", "gather"])
def test_attention_whose_bits_depend_on_the_step_is_refused(attention: str) -> None:
    config = TargetConfig.model_validate({"deterministic": "on", "attention": attention})
    with pytest.raises(
        ConfigError, match=f"attention is '{attention}' with target.deterministic 'on'; allowed"
    ):
        chosen_backend(config, Model(HEADS, torch.bfloat16, CUDA))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_without_the_kernels_is_refused_by_the_name_of_the_setting() -> None:
    config = TargetConfig.model_validate({"deterministic": "on"})
    with pytest.raises(
        ConfigError, match=r"'on', whose attention does not work here: .*; allowed here: 'off'"
    ):
        chosen_backend(config, Model(HEADS, torch.bfloat16, CUDA))
    with pytest.raises(ConfigError, match=r"'on', whose products do not work here: .*; allowed here: 'off'"):
        cuda_operators(torch.bfloat16, CUDA, is_fixed=True)


@pytest.mark.parametrize("family", ["mixtral", "granitemoeshared"])
def test_a_mixture_on_a_cpu_has_the_same_bits_unless_torch_computes_some_of_it(
    tmp_path: Path, family: str
) -> None:
    """With a shared MLP and without: its experts, its router and its shared MLP are all looked at."""
    path = write_checkpoint(tmp_path, family)
    config = TargetConfig.model_validate({"deterministic": "on"})
    loaded = load_model(ModelArgs(str(path), role="target"), dtype=torch.float32, device=CPU)
    forward = cpu_runner(path).forward
    assert isinstance(forward, DecoderForward)
    assert why_not(config, loaded, forward, None) is None

    def reason(gate: ExpertLayer | WithSharedMlp) -> str | None:
        layers = (*forward.layers[:-1], replace(forward.layers[-1], gate=gate))
        return why_not(config, loaded, replace(forward, layers=layers), None)

    gate = forward.layers[-1].gate
    routed = gate.experts if isinstance(gate, WithSharedMlp) else gate
    assert isinstance(routed, ExpertLayer)
    assert reason(replace(routed, experts=ExpertsInTurn([]))) == "its experts run with torch's operators"
    plain = PlainLinear(torch.ones(3, 24), None)
    by_torch = "a layer of 24 inputs runs with torch's operators"
    assert reason(replace(routed, router=Router(plain, Routing(1)))) == by_torch
    if isinstance(gate, WithSharedMlp):
        assert reason(replace(gate, shared=replace(gate.shared, gate=JoinedGate(plain)))) == by_torch
        assert reason(replace(gate, shared=replace(gate.shared, down=plain))) == by_torch
        assert reason(replace(gate, gate=plain)) == by_torch


class ThreeRanks(ParallelContext):
    """The sums of one of three ranks, whose numbers are given."""

    def __init__(self, numbers: torch.Tensor, *, sums_in_order: bool) -> None:
        self.rank, self.world_size, self.sums_in_order = 0, 3, sums_in_order
        self._numbers = numbers

    def exchange(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._numbers


def test_ranks_are_added_up_in_their_order_and_rounded_once() -> None:
    # The second and the third are half a step of the first each, and would be lost one by one.
    numbers = torch.tensor([[[1.0]], [[2.0**-8]], [[2.0**-8]]]).bfloat16()
    own = numbers[0].clone()
    total = ThreeRanks(numbers, sums_in_order=True).all_reduce(own)
    assert total is own and total.item() == 1.0 + 2.0**-7
