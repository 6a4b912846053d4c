"""Stacked experts, as gpt-oss has them: what they compute, and that the parts of the ranks are the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specray.engine.activation import Clamp
from specray.engine.group.parallel import ParallelContext
from specray.engine.model.checkpoint.rank_weights import RankWeights
from specray.engine.model.layers.experts.config import DOWN, GATE_UP, Experts, Routing, Stacked
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertsInTurn
from specray.engine.model.layers.experts.lowering import lower_experts
from specray.engine.model.operators_torch import TorchOperators
from tests.unit.engine.model.checkpoints import InMemoryWeights
from tests.unit.engine.model.test_lowering import CONFIG, rank

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 8, 6, 5, 3
EXPERTS = Experts(
    NUM_EXPERTS,
    INNER,
    (True, True),
    Routing(NUM_CHOSEN, has_bias=True, chooses_by_product=True),
    Stacked(is_transposed=True, is_in_turn=True),
    has_bias=True,
    clamp=Clamp(gain=1.702, limit=1.5),
)
STACKED = replace(CONFIG, experts=EXPERTS)


def weights() -> dict[str, torch.Tensor]:
    """Random ones of layer 1, large enough that gates and ups reach the limit."""
    numbers = torch.Generator().manual_seed(3)
    return {
        name.removeprefix("model.layers.1."): torch.randn(shape, generator=numbers)
        for name, shape in STACKED.weight_shapes().items()
        if name.startswith("model.layers.1.mlp")
    }


def lowered(tensors: dict[str, torch.Tensor], parallel: ParallelContext | None) -> ExpertLayer:
    taken = RankWeights(InMemoryWeights(tensors), parallel)
    return lower_experts("", EXPERTS, STACKED, taken, TorchOperators(torch.float32))


def expected(tensors: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    """One row's output, number by number."""
    logits = tensors["mlp.gate.weight"] @ row + tensors["mlp.gate.bias"]
    chosen = logits.argsort(descending=True)[:NUM_CHOSEN].tolist()
    shares = logits[chosen].softmax(0)
    output = torch.zeros(HIDDEN)
    for expert, share in zip(chosen, shares, strict=True):
        both = row @ tensors[GATE_UP][expert] + tensors[f"{GATE_UP}_bias"][expert]
        inner = []
        for index in range(INNER):
            gate = min(float(both[2 * index]), 1.5)
            up = max(-1.5, min(float(both[2 * index + 1]), 1.5))
            inner.append(gate / (1.0 + float(torch.exp(torch.tensor(-1.702 * gate)))) * (up + 1.0))
        down = torch.tensor(inner) @ tensors[DOWN][expert] + tensors[f"{DOWN}_bias"][expert]
        output += share * down
    return output


def test_clamped_experts_behind_a_router_with_a_bias() -> None:
    tensors = weights()
    rows = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        lowered(tensors, None)(rows),
        torch.stack([expected(tensors, row) for row in rows]),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_the_ranks_add_up(world_size: int) -> None:
    tensors = weights()
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5))
    parts = [lowered(tensors, rank(number, world_size)) for number in range(world_size)]
    in_turn = [part.experts for part in parts if isinstance(part.experts, ExpertsInTurn)]
    assert [each.experts[0].down.in_features for each in in_turn] == [INNER // world_size] * world_size
    total = torch.stack([part(rows) for part in parts]).sum(0)
    torch.testing.assert_close(total, lowered(tensors, None)(rows), atol=1e-5, rtol=1e-5)


def test_what_stays_of_the_files_is_a_copy() -> None:
    tensors = weights()
    layer, rows = lowered(tensors, None), torch.ones(1, HIDDEN)
    before = layer(rows)
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(layer(rows), before)
