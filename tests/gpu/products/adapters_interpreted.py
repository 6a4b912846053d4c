"""Runs the Triton kernels of adapters on CPU; started by test_products with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import torch

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cuda.epilogue import PlainWeight
from specray.engine.cuda.linear import ProductGate
from specray.engine.cuda.low_rank_triton import TritonLowRank, check_low_rank
from specray.engine.model.adapters.layers import AddedGate, AddedLinear, TorchLowRank
from specray.engine.model.adapters.rows import AdapterRows, RowPlan
from specray.engine.model.linear import PlainLinear
from specray.engine.model.operators_triton import TritonGate

CPU = torch.device("cpu")
IN_FEATURES, QUERIES, KEYS, RANK = 72, 80, 24, 20


def _parts(seed: int, *ranks: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Queries and keys, each with ranks of its own."""
    random = torch.Generator().manual_seed(seed)
    down = torch.randn(sum(ranks), IN_FEATURES, generator=random)
    ups, first = [], 0
    for size, rank in zip((QUERIES, KEYS), ranks, strict=True):
        up = torch.zeros(size, sum(ranks))
        up[:, first : first + rank] = torch.randn(size, rank, generator=random)
        ups.append(up)
        first += rank
    return down, tuple(ups)


def _made(*, is_fixed: bool = False) -> tuple[TritonLowRank, TorchLowRank]:
    own = TritonLowRank(
        IN_FEATURES,
        (QUERIES, KEYS),
        num_slots=3,
        max_rank=2 * RANK,
        max_own=RANK,
        dtype=torch.float32,
        device=CPU,
        is_fixed=is_fixed,
    )
    plain = TorchLowRank(CPU, torch.float32, {})
    for slot, ranks in ((0, (20, 1)), (2, (3, 17))):
        for each in (own, plain):
            each.put(slot, each.pack(*_parts(slot, *ranks)))
    return own, plain


def _plan(slots: list[int]) -> RowPlan:
    rows = AdapterRows(3, CPU)
    rows.begin(slots, None)
    return rows.of(len(slots))


def products() -> None:
    """What is added is torch's; a row has the same bits alone, and rows without adapters keep theirs."""
    check_low_rank(CPU, torch.bfloat16)
    own, plain = _made()
    slots = [2, -1, 0, 1, 0, -1, 2]
    rows, out = torch.randn(len(slots), IN_FEATURES), torch.randn(len(slots), QUERIES + KEYS)
    found = own.add(out.clone(), rows, _plan(slots))
    torch.testing.assert_close(found, plain.add(out.clone(), rows, _plan(slots)), atol=1e-3, rtol=1e-4)
    for index, slot in enumerate(slots):
        alone = own.add(out[index : index + 1].clone(), rows[index : index + 1], _plan([slot]))
        assert torch.equal(alone[0], found[index]), index
        assert torch.equal(found[index], out[index]) == (slot in (-1, 1)), index
    own.put(2, own.pack(*_parts(5, 2, 2)))
    own.clear(0)
    again = own.add(out.clone(), rows, _plan(slots))
    assert torch.equal(again[2], out[2]) and not torch.equal(again[0], found[0])


def prompts() -> None:
    """Many rows are torch's products, but where bits must not depend on their number."""
    slots = [(0, 2, -1)[index % 3] for index in range(70)]
    rows, out = torch.randn(70, IN_FEATURES), torch.zeros(70, QUERIES + KEYS)
    (free, plain), (fixed, _) = _made(), _made(is_fixed=True)
    expected = plain.add(out.clone(), rows, _plan(slots))
    for own in (free, fixed):
        found = own.add(out.clone(), rows, _plan(slots))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(fixed.add(out[:5].clone(), rows[:5], _plan(slots[:5])), found[:5])


def gates() -> None:
    """Gates in two steps have the bits of those in one where a row has no adapter."""
    weight = torch.randn(QUERIES + KEYS, IN_FEATURES)
    own, _ = _made()
    rows = AdapterRows(3, CPU)
    slots = [-1, 0, 2, -1]
    rows.begin(slots, None)
    numbers = torch.randn(4, IN_FEATURES) / 8
    for joint in (Activation.SILU, Activation.GELU_TANH, Clamp(1.7, 2.0)):
        _check_gate(ProductGate(PlainWeight(weight), None, joint, torch.float32), own, rows, numbers, joint)
    linear = PlainLinear(weight, None)
    _check_gate(TritonGate(linear, Activation.SILU), own, rows, numbers, Activation.SILU)
    adapted = AddedLinear(linear, own, rows)
    assert torch.equal(adapted(numbers)[[0, 3]], linear(numbers)[[0, 3]])
    summand = torch.ones(4, QUERIES + KEYS)
    torch.testing.assert_close(
        adapted.plus(numbers, summand.clone()), adapted(numbers) + 1, atol=1e-4, rtol=0
    )


def _check_gate(
    gate: ProductGate | TritonGate, own: TritonLowRank, rows: AdapterRows, numbers: torch.Tensor, joint: Joint
) -> None:
    found, base = AddedGate(gate, own, rows)(numbers), gate(numbers)
    assert torch.equal(found[[0, 3]], base[[0, 3]]), joint
    both = own.add(gate.products(numbers), numbers, rows.of(len(numbers)))
    torch.testing.assert_close(found, gate.joined(both), atol=1e-6, rtol=1e-6)
    assert not torch.equal(found[1], base[1]), joint


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in sys.argv[1:]:
        {"products": products, "prompts": prompts, "gates": gates}[part]()
    print("agreed")
