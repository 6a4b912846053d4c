"""Logits of a captured step are read where the head writes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specray.draft_tokens import DraftTokens
from specray.engine.cache.sequence import EngineSequence
from specray.engine.group.parallel import GroupArgs, ParallelContext
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.layers.vocabulary import GatheredHead
from specray.engine.model.linear import PlainLinear, WideLinear
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.schedule import CatchUp, catch_up
from specray.types import SamplingParams
from tests.unit.engine.harness import Session, verify
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runners import cpu_runner, graphed, target_over

WIDE = {torch.ops.aten.mm.dtype: False, torch.ops.aten.mm.dtype_out: True}
"""Products that a GPU leaves in float32, and whether they are written to a tensor that is given."""


class Copies(TorchDispatchMode):
    """Counts copies of anything as wide as logits, and plays a GPU's products on a CPU."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.products: Counter[bool] = Counter()
        self._vocab_size = vocab_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WIDE:
            self.products[WIDE[func]] += 1
            products = args[0].float() @ args[1].float()
            out = kwargs.get("out")
            return products if out is None else torch.ops.aten.add.out(products, 0.0, out=out)
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        is_copy = name in ("clone", "copy_", "_to_copy", "cat", "index", "index_select")
        if is_copy and result.shape[-1:] == (self._vocab_size,):
            self.counts[name] += 1
        return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Runs a forward whose head is one that a GPU has too."""
    path = write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
    runner = cpu_runner(path, attention="gather", block_size=4, max_num_seqs=8, max_model_len=64)
    assert isinstance(runner.forward, DecoderForward)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(runner.info.vocab_size, runner.forward.head.in_features, generator=generator)  # type: ignore[attr-defined]
    forward = replace(runner.forward, head=PlainLinear(weight, None))
    return ModelRunner(forward, runner.cache, runner.info)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(seed=3)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_verify_of_a_captured_step_copies_no_logits(
    plain: ModelRunner, sampling: SamplingParams, is_wide: bool
) -> None:
    if is_wide:
        assert isinstance(plain.forward, DecoderForward) and isinstance(plain.forward.head, PlainLinear)
        head = WideLinear(plain.forward.head.weight.bfloat16(), None)
        plain = ModelRunner(replace(plain.forward, head=head), plain.cache, plain.info)
    engine = target_over(graphed(plain)[0])
    engine._sampler = DeviceSampler(Kernels(), 8)
    session = Session("a", [5, 7, 9, 11], sampling)
    with Copies(plain.info.vocab_size) as copies:
        for _ in range(4):
            verify(engine, session, DraftTokens((3, 4, 6)))
    assert copies.counts == {}
    if is_wide:
        # Of three buckets at most one gives a tensor of its own: how wide logits are is found once.
        assert copies.products[False] == 1 and copies.products[True] >= 4
    engine.release(["a"])


def test_logits_of_several_forwards_are_all_kept(plain: ModelRunner) -> None:
    """All but the last are copied before the next one overwrites them."""
    runner, _ = graphed(plain)

    def work() -> list[CatchUp]:
        items = []
        for index, length in enumerate((6, 9, 3)):
            table: Any = SimpleNamespace(block_ids=list(range(4 * index, 4 * index + 3)))
            token_ids = [(5 * index + place) % 90 + 2 for place in range(length)]
            sequence = EngineSequence(f"{index}", SamplingParams(), table, token_ids, length)
            items.append(CatchUp(sequence, length - 1))
        return items

    expected = catch_up(plain, work(), 4)
    got = catch_up(runner, work(), 4)
    assert expected is not None and got is not None and len(got.logits) == 5 + 8 + 2
    torch.testing.assert_close(got.logits, expected.logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_rank_writes_its_own_logits_where_they_are_wanted(has_bias: bool) -> None:
    weight, rows = torch.randn(7, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    local = PlainLinear(weight, torch.randn(7).bfloat16() if has_bias else None)
    head = GatheredHead(local, 14, ParallelContext.__new__(ParallelContext))
    out = torch.empty(3, 7, dtype=torch.bfloat16)
    with Copies(7) as copies:
        head.precise_into(rows, out)
    assert torch.equal(out, head.precise(rows)) and copies.counts == {}


def test_joined_logits_are_cast_as_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of ten tokens; the last has one, and what pads it is dropped."""
    whole = torch.randn(2, 10).bfloat16()
    group = ParallelContext(GroupArgs(3, 4, "cpu"), None, None)  # type: ignore[arg-type]

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        assert mine.shape == (2, 3)
        for rank, part in enumerate(parts):
            columns = whole[:, 3 * rank : 3 * rank + 3]
            part.fill_(-7.0)
            part[:, : columns.shape[1]] = columns

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    with Copies(10) as copies:
        joined = group.all_gather(whole[:, 9:], 10)
    assert joined.dtype == torch.float32 and torch.equal(joined, whole.float())
    assert copies.counts == {}
