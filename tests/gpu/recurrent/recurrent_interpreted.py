"""Runs the Triton kernels of recurrent layers on CPU; started by test_recurrent with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specray.engine.cache.state_pool import StatePool
from specray.engine.cuda.recurrent import heads_triton, step_triton
from specray.engine.cuda.recurrent.heads_triton import keep, mix
from specray.engine.inputs import SequenceInput
from specray.engine.model import operators_triton
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.layers.convolution import convolve
from specray.engine.model.layers.delta import GatedDelta
from specray.engine.model.layers.experts.config import Routing
from specray.engine.model.layers.experts.layer import ExpertMlp
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.experts.triton import TritonExperts
from specray.engine.model.layers.recurrences import HeadRows, recur
from specray.engine.model.operators_triton import TritonDelta, TritonOperators, recurred
from specray.engine.runner import assembly
from specray.engine.runner.cuda_graphs import Bucket
from specray.engine.step import SequenceRows, StateShape
from tests.unit.engine.cpu.test_recurrence import run
from tests.unit.engine.harness import verify_all
from tests.unit.engine.model.checkpoints import write_family
from tests.unit.engine.model.test_recurrent_targets import (
    GREEDY,
    LONG,
    SHORT,
    Expected,
    drafted,
    make_engine,
    new_session,
)
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner, graphed

CPU, NAN = torch.device("cpu"), float("nan")
SHAPES = (
    (StateShape(4, 2, 8, 12, 1, 2 * 16 + 48, 4), torch.float32),
    # Columns for two programs, and channels that are no multiple of a head's.
    (StateShape(3, 1, 10, 40, 1, 2 * 10 + 120, 2), torch.bfloat16),
)


def make_pool(shape: StateShape, dtype: torch.dtype = torch.float32, *, num_slots: int = 3) -> StatePool:
    """Whose memory holds NaN."""
    pool = StatePool([shape, shape], num_slots=num_slots, max_open=8, dtype=dtype, device=CPU)
    pool.layers[1].fill(NAN)
    return pool


def make_mixer(shape: StateShape) -> GatedDelta:
    torch.manual_seed(0)
    heads, taps = shape.num_heads, torch.randn(shape.num_taps, shape.num_channels)
    rates, bias = torch.rand(heads) + 0.1, torch.randn(heads)
    return GatedDelta(shape, taps, rates, bias, torch.rand(shape.value_dim), 1e-6, 2.0)


def projected(shape: StateShape, num_rows: int, seed: int) -> torch.Tensor:
    width = shape.num_channels + shape.num_heads * (shape.value_dim + 2)
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def layers() -> None:
    """Prompts of one token and of several, verifies of which nothing, some and all stays, side by side."""
    steps = [
        [(0, 0, 1, 1), (2, 0, 70, 4)],
        [(0, 1, 3, 3), (2, 66, 5, 5), (1, 0, 2, 2)],
        [(1, 1, 8, 8), (0, 2, 1, 1), (2, 71, 8, 8)],
        [(2, 72, 1, 1), (1, 9, 8, 8), (0, 3, 20, 1)],
        [(2, 72, 3, 0), (1, 10, 1, 1)],
    ]
    for shape, dtype in SHAPES:
        mixer = make_mixer(shape)
        kernels = TritonDelta(mixer)
        pools = make_pool(shape, dtype), make_pool(shape, dtype)
        for seed, parts in enumerate(steps):
            rows = projected(shape, sum(count for _, _, count, _ in parts), seed).to(dtype)
            found, expected = (
                run(each, pool, rows, *parts) for each, pool in zip((kernels, mixer), pools, strict=True)
            )
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        kept, meant = (pool.layers[1] for pool in pools)
        for field in fields(kept)[1:]:
            pair = (getattr(each, field.name).float().nan_to_num(7.0) for each in (kept, meant))
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


def bits() -> None:
    """Rows have plain decoding's bits, whatever of a verify stays, and whatever else the step computes."""
    shape = StateShape(2, 1, 4, 6, 1, 20, 3)
    kernels = TritonDelta(make_mixer(shape))
    rows, wrong = projected(shape, 12, 1), projected(shape, 12, 2)
    plain = make_pool(shape)
    expected = [run(kernels, plain, rows[:2], (1, 0, 2, 1))]
    expected += [run(kernels, plain, rows[at : at + 1], (1, at, 1, 1)) for at in range(2, 12)]
    output = torch.cat(expected)
    for num_open, num_kept in ((1, 0), (3, 2), (8, 0), (8, 8)):
        pool = make_pool(shape)
        run(kernels, pool, rows[:2], (1, 0, 2, 1))
        mixed = torch.cat((wrong[:1], rows[2 : 2 + num_kept], wrong[2 + num_kept : 2 + num_open]))
        found = run(kernels, pool, mixed, (2, 0, 1, 1), (1, 2, num_open, num_open))
        assert torch.equal(found[1 : 1 + num_kept], output[2 : 2 + num_kept])
        at = 2 + num_kept
        found = run(kernels, pool, rows[at : at + 1], (1, at, 1, 1))
        assert torch.equal(found, output[at : at + 1]), (num_open, num_kept)


def staying() -> None:
    """As a draft's: rows one by one while the state stays, of which the next round takes some back."""
    shape = StateShape(2, 1, 4, 6, 1, 20, 3)
    kernels = TritonDelta(make_mixer(shape))
    rows, wrong = projected(shape, 16, 1), projected(shape, 16, 2)
    plain = make_pool(shape)
    expected = [run(kernels, plain, rows[:2], (1, 0, 2, 1))]
    expected += [run(kernels, plain, rows[at : at + 1], (1, at, 1, 1)) for at in range(2, 16)]
    output = torch.cat(expected)
    for num_kept in (0, 1, 3):
        pool, at = make_pool(shape), 2
        run(kernels, pool, rows[:2], (1, 0, 2, 1))
        for _ in range(3):
            for index in range(4):
                own = rows if index < num_kept else wrong
                step = torch.cat((wrong[:1], own[at + index : at + index + 1]))
                found = run(kernels, pool, step, (2, 0, 1, 1), (1, at + index, 1, index + 2))
                assert pool.bases[1] == at - 1
                assert index >= num_kept or torch.equal(found[1:], output[at + index : at + index + 1])
            at += num_kept


def records() -> None:
    """Of each verify the first rows stay and the others are of other tokens: for all numbers of both."""
    for gate_dim, has_rates in ((1, True), (4, True), (1, False)):
        heads, wrong = (
            heads_of(21, gate_dim, has_rates=has_rates, sizes=(1, 1, 4, 6), seed=seed) for seed in (0, 1)
        )
        shape = StateShape(1, 1, 4, 6, gate_dim, 4, 2)

        def step(pool: StatePool, some: HeadRows, start: int, num_open: int) -> torch.Tensor:
            with pool.step([SequenceRows(0, len(some.values), start, [0], (), 1, num_open)]):
                return kept(some, pool)

        plain = make_pool(shape)
        expected = [step(plain, heads[:3], 0, 1)]
        expected += [step(plain, heads[at : at + 1], at, 1) for at in range(3, 21)]
        output = torch.cat(expected)
        is_usual = gate_dim == 1 and has_rates
        for num_open in range(1, 9) if is_usual else (1, 3, 8):
            for num_kept in range(num_open + 1) if is_usual else (0, num_open):
                pool, at = make_pool(shape), 3
                step(pool, heads[:3], 0, 1)
                for _ in range(2 if num_open < 4 else 1):
                    mixed = joined(heads[at : at + num_kept], wrong[at + num_kept : at + num_open])
                    found = step(pool, mixed, at, num_open)
                    assert torch.equal(found[:num_kept], output[at : at + num_kept])
                    at += num_kept
                found = step(pool, heads[at : at + 1], at, 1)
                assert torch.equal(found, output[at : at + 1]), (num_open, num_kept)


def joined(first: HeadRows, second: HeadRows) -> HeadRows:
    both = [(getattr(first, field.name), getattr(second, field.name)) for field in fields(HeadRows)]
    return HeadRows(*(None if one is None else torch.cat((one, other)) for one, other in both))  # type: ignore[arg-type]


def padding() -> None:
    """Rows and sequences that round a step up change nothing, and nobody's rows are 0."""
    shape = SHAPES[0][0]
    kernels = TritonDelta(make_mixer(shape))
    rows = projected(shape, 6, 1)
    pools = make_pool(shape), make_pool(shape)
    expected = run(kernels, pools[0], rows[:3], (1, 0, 2, 2), (0, 0, 1, 1))
    table = torch.tensor([[1, 0, 0, 0, 0, 2], [0, 0, 0, 0, 2, 1], [0] * 6, [0] * 6], dtype=torch.int32)
    with pools[1].described_by(table):
        found = kernels(rows, pools[1], 1)
    assert torch.equal(found[:3], expected) and found[3:].eq(0.0).all()
    for each, other in zip(*(vars_of(pool) for pool in pools), strict=True):
        assert torch.equal(each, other)


def vars_of(pool: StatePool) -> list[torch.Tensor]:
    layer = pool.layers[1]
    return [getattr(layer, field.name).nan_to_num(7.0) for field in fields(layer)[1:]]


def heads_of(
    num_rows: int,
    gate_dim: int,
    *,
    has_rates: bool,
    sizes: tuple[int, int, int, int] = (2, 1, 8, 20),
    seed: int = 0,
) -> HeadRows:
    """Rows of which some are forgotten at once, and some hardly."""
    num_heads, num_key_heads, key_dim, value_dim = sizes
    torch.manual_seed(seed)
    unit = torch.nn.functional.normalize
    queries, keys = (unit(torch.randn(num_rows, num_key_heads, key_dim), dim=-1) for _ in range(2))
    decays = -torch.randn(num_rows, num_heads, gate_dim).exp()
    decays[5:9] *= 9
    decays[9:70] *= 0.01
    rates = torch.rand(num_rows, num_heads) if has_rates else None
    return HeadRows(queries, keys, torch.randn(num_rows, num_heads, value_dim), decays, rates)


def kinds() -> None:
    """Kimi's gates and Mamba's states: chunks and steps are those of torch's operators, in all their cuts."""
    for gate_dim, has_rates in ((8, True), (1, False)):
        heads = heads_of(75, gate_dim, has_rates=has_rates)
        # A record of a key for each head, though they share one.
        shape = StateShape(2, 2, 8, 20, gate_dim, 4, 4)
        pools = make_pool(shape), make_pool(shape)
        # Chunks that end at 64 and within, a verify of which some stays, and rows one by one.
        for start, end, num_open in ((0, 3, 1), (3, 66, 4), (64, 70, 6), (67, 68, 1), (68, 75, 0)):
            rows = SequenceRows(0, end - start, start, [0], (), 1, num_open)
            some = heads[start:end]
            expected = torch.empty_like(some.values)
            with pools[0].step([rows]):
                recur(shared(some), pools[0].layers[1], pools[0].rows[0], expected)
            with pools[1].step([rows]):
                found = kept(some, pools[1])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-5)


def shared(heads: HeadRows) -> HeadRows:
    """With a key for each head: what torch's operators keep."""
    queries, keys = (each.repeat_interleave(2, 1) for each in (heads.queries, heads.keys))
    return HeadRows(queries, keys, heads.values, heads.log_decays, heads.rates)


def kept(heads: HeadRows, pool: StatePool) -> torch.Tensor:
    layer, decays = pool.layers[1], heads.log_decays.exp()
    out = recurred(heads, decays, layer, pool)
    records = layer.updates, layer.decays, layer.keys
    rows = torch.ones(len(out), layer.inputs.shape[2])
    return keep(rows, out, heads.keys, decays, layer.inputs, records, pool.table).view(out.shape)


def cuts() -> None:
    """A prompt has the same bits however it is cut at multiples of 64, and behind any of these cuts."""
    heads = heads_of(130, 1, has_rates=True, sizes=(1, 1, 8, 12))
    shape = StateShape(1, 1, 8, 12, 1, 4, 4)

    def outputs(*ends: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, start, found = make_pool(shape), 0, []
        for end in ends:
            rows = SequenceRows(0, end - start, start, [0], (), 1, 1 if end == 130 else 0)
            with pool.step([rows]):
                found.append(kept(heads[start:end], pool))
            start = end
        return torch.cat(found), pool.layers[1].states[1]

    whole, state = outputs(130)
    for ends in ((64, 130), (128, 130), (64, 128, 130)):
        found, end_state = outputs(*ends)
        assert torch.equal(found, whole) and torch.equal(end_state, state), ends


def convolutions() -> None:
    """With a bias, and more channels than a program has; rows begin in the middle of the kept inputs."""
    shape = StateShape(2, 2, 8, 8, 1, 150, 4)
    taps, bias = torch.randn(4, 150), torch.randn(150)
    pools = make_pool(shape), make_pool(shape)
    rows = torch.randn(30, 160)
    for start, end, num_open in ((0, 2, 1), (2, 20, 3), (18, 22, 4), (19, 27, 8)):
        item = SequenceRows(0, end - start, start, [0], (), 1, num_open)
        with pools[0].step([item]):
            layer = pools[0].layers[1]
            expected = convolve(rows[start:end, :150], taps, bias, layer, pools[0].rows[0])
        with pools[1].step([item]):
            layer = pools[1].layers[1]
            found = mix(rows[start:end], taps, bias, layer.inputs, pools[1].table)
            nothing = torch.zeros(end - start, 2, 8)
            records = layer.updates, layer.decays, layer.keys
            keep(rows[start:end], nothing, nothing, nothing[..., :1], layer.inputs, records, pools[1].table)
        torch.testing.assert_close(found, torch.nn.functional.silu(expected), rtol=1e-5, atol=1e-5)
        assert torch.equal(*(pool.layers[1].inputs.nan_to_num(7.0) for pool in pools))


def captured() -> None:
    """Steps of a hybrid through captured forwards, padded to buckets, give the library's tokens."""
    assembly.cpu_operators = lambda dtype, num_threads: TritonOperators(dtype)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        path = write_family(Path(name), FAMILIES["qwen3_5"])
        eager = cpu_runner(path, max_model_len=96, max_num_seqs=4, block_size=16, attention="gather")
        assert isinstance(eager.forward, DecoderForward) and eager.forward.can_be_captured
        runner, graphs = graphed(eager)
        engine, expected = make_engine(runner), Expected(path)
    pair = [(new_session("a", LONG[:9], GREEDY), LONG[:9]), (new_session("b", SHORT, GREEDY), SHORT)]
    for number in range(4):
        # The first step is of prompts.
        sessions = pair if number % 2 else pair[:1] if number else pair
        drafts = [
            drafted(expected.of(prompt, GREEDY), session, len(prompt), (number + index) % 3 + 1)
            for index, (session, prompt) in enumerate(sessions)
        ]
        verify_all(engine, [session for session, _ in sessions], drafts)
        for session, prompt in pair:
            found = session.token_ids[len(prompt) :]
            assert found == expected.of(prompt, GREEDY)[: len(found)]
    assert {count for session, _ in pair for count in session.accepted} >= {1, 2, 3}
    assert graphs.buckets == (Bucket(2, 5, False), Bucket(1, 5, False))
    # What a step without a prompt has captured a prompt does not run through.
    assert graphs.bucket_for([SequenceInput([5, 6], 0, [0], 1, num_open=1)]) is None


class _Launcher:
    """A kernel that is only launched: on a device, the host learns nothing from it."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


def waits() -> None:
    """Between launches a layer's step reads no number of the device: its tensors here have none."""
    for module, names in ((heads_triton, ("_mix", "_keep")), (step_triton, ("_step",))):
        for kernel in names:
            setattr(module, kernel, _Launcher())
    shape = SHAPES[0][0]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        mixer = make_mixer(shape)
        pool = StatePool(
            [shape, shape], num_slots=3, max_open=8, dtype=torch.bfloat16, device=torch.device("cuda")
        )
        rows = torch.empty(6, shape.num_channels + shape.num_heads * (shape.value_dim + 2))
        with pool.described_by(torch.empty(3, 6, dtype=torch.int32)):
            out = TritonDelta(mixer)(rows, pool, 1)
        assert (out.shape, out.device.type) == ((6, shape.num_heads * shape.value_dim), "cuda")
        # Torch's operators do wait, and so does who reads a number.
        with pytest.raises(Exception, match="aten"):
            bool(rows.sum())


def proofs() -> None:
    """A layer whose kernels give other numbers, or do not run here, is left to torch's operators."""
    shape = StateShape(2, 1, 4, 6, 1, 20, 3)
    mixer, operators = make_mixer(shape), TritonOperators(torch.float32)
    assert isinstance(operators.mixer(mixer), TritonDelta)
    gate, down = (torch.randn(3, *size) for size in ((16, 8), (8, 8)))
    experts = [
        ExpertMlp(operators.gate(first, second, None, None), operators.linear(end, None))
        for (first, second), end in zip((both.chunk(2) for both in gate), down, strict=True)
    ]
    router = Router(operators.router(torch.randn(3, 8), None), Routing(2))
    assert operators.experts(router, experts).can_be_captured
    plain = TritonExperts.__call__
    for wrong in (lambda *args: plain(*args) * 1.01, lambda *args: plain(*args) / 0):
        TritonExperts.__call__ = wrong  # type: ignore[assignment]
        assert not operators.experts(router, experts).can_be_captured
    operators_triton.advance = lambda *args: None  # type: ignore[attr-defined]
    assert operators.mixer(mixer) is mixer


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = (layers, bits, staying, records, padding, kinds, cuts, convolutions, captured, waits, proofs)
    with torch.inference_mode():
        {part.__name__: part for part in parts}[sys.argv[1]]()
    print("agreed")
