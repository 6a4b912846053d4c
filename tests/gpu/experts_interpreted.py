"""Runs the Triton kernels of experts on CPU; started by test_experts with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import torch

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cuda.align import align
from specray.engine.cuda.align_triton import align_pairs, count_hits
from specray.engine.cuda.tiles import FIXED, FREE, TileRule
from specray.engine.model.layers.experts.layer import ExpertMlp
from specray.engine.model.layers.experts.triton import TritonExperts
from specray.engine.model.linear import JoinedGate, PlainLinear
from tests.gpu.expert_cases import CASES, check_alignment, routing


def alignments() -> None:
    for case in CASES:
        chosen = routing(case)
        for make in (align, align_pairs):
            check_alignment(make(chosen, case.num_experts, case.tile_rows), chosen, case)
        hits = torch.zeros(1, dtype=torch.int32)
        count_hits(chosen, case.num_experts, hits)
        assert int(hits) == len(chosen.unique()), case


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(
    both: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    joint: Joint,
    rule: TileRule = FREE,
) -> TritonExperts:
    """The experts of weights and biases that are theirs by the first dimension."""
    experts = [
        ExpertMlp(
            JoinedGate(PlainLinear(both[n], None if biases is None else biases[0][n]), joint),
            PlainLinear(down[n], None if biases is None else biases[1][n]),
        )
        for n in range(len(both))
    ]
    layer = TritonExperts.of(experts, rule)
    assert layer is not None
    return layer


def products() -> None:
    """Each pair by its expert, with every way to join gate and up, for sizes that fill no block."""
    num_experts, hidden, inner, num_chosen = 5, 40, 24, 2
    clamp = Clamp(gain=1.7, limit=0.5)
    both, down = random(5, 2 * inner, hidden, seed=1), random(5, hidden, inner, seed=2)
    both_bias, down_bias = random(5, 2 * inner, seed=3), random(5, hidden, seed=4)
    for joint, has_bias in ((Activation.SILU, False), (Activation.GELU_TANH, True), (clamp, True)):
        experts = made(both, down, (both_bias, down_bias) if has_bias else None, joint)
        # Of a prompt, tiles are larger.
        for num_rows in (1, 3, 20, *([514] if has_bias else [])):
            rows, weights = random(num_rows, hidden, seed=5), random(num_rows, num_chosen, seed=6)
            chosen = random(num_rows, num_experts, seed=7).argsort(-1)[:, :num_chosen]
            expected = torch.zeros_like(rows)
            for row, place in ((row, place) for row in range(num_rows) for place in range(num_chosen)):
                number = int(chosen[row, place])
                gate, up = (both[number] @ rows[row] + (both_bias[number] if has_bias else 0.0)).chunk(2)
                if isinstance(joint, Clamp):
                    gate, up = gate.clamp(max=joint.limit), up.clamp(-joint.limit, joint.limit)
                    gated = gate * torch.sigmoid(gate * joint.gain) * (up + 1.0)
                elif joint is Activation.SILU:
                    gated = torch.nn.functional.silu(gate) * up
                else:
                    gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
                output = down[number] @ gated + (down_bias[number] if has_bias else 0.0)
                expected[row] += weights[row, place] * output
            torch.testing.assert_close(experts(rows, chosen, weights), expected, atol=1e-4, rtol=1e-4)


def bits() -> None:
    """A row has the same bits at 1 to 64 rows, alone in its expert or with all of them there."""
    experts = made(random(6, 64, 32, seed=1), random(6, 32, 32, seed=2), None, Activation.SILU, FIXED)
    assert experts.is_fixed
    rows, weights = random(514, 32, seed=3), random(514, 2, seed=4)
    spread = random(514, 6, seed=5).argsort(-1)[:, :2]
    for chosen in (spread, torch.tensor([4, 1]).expand(514, 2)):
        most = experts(rows, chosen, weights)
        for some in (*(slice(i, i + 1) for i in (0, 16, 63)), slice(2), slice(15), slice(33), slice(64)):
            assert torch.equal(experts(rows[some], chosen[some], weights[some]), most[some]), some


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"alignments": alignments, "products": products, "bits": bits}[sys.argv[1]]()
    print("agreed")
