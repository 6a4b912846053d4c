"""Captured forwards compute what the runner computes as it is, whatever rounds the step up to its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner, prepared_buckets
from specray.engine.runner.cuda_graphs import (
    MAX_ROWS,
    SEQUENCES,
    WIDTHS,
    Bucket,
    GraphedForward,
    Work,
    bucket_for,
    run_again,
)
from specray.engine.runner.runner import ModelRunner
from specray.engine.target.engine import TargetEngine
from specray.engine.visibility import branch_visibility
from specray.errors import ConfigError
from specray.types import SamplingParams
from tests.unit.engine.harness import Session, engine_info, verify
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from tests.unit.engine.trees.drafters import tree_drafter

ATOL = 2e-5
CONTEXT = [5, 7, 9, 11, 13, 2, 4, 60, 33]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> ModelRunner:
    config = EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        device="cpu",
        attention="gather",
        block_size=4,
        max_num_seqs=64,
        num_threads=1,
    )
    runner = build_runner(config, role="target")
    assert runner.info.attention == "gather" and runner.graphs is None
    return runner


def graphed(runner: ModelRunner, capture: object = run_again) -> ModelRunner:
    graphs = GraphedForward(
        runner.forward,
        runner.cache,
        max_model_len=runner.info.max_model_len,
        capture=capture,  # type: ignore[arg-type]
    )
    return ModelRunner(runner.forward, runner.cache, runner.info, graphs=graphs)


def step(runner: ModelRunner, num_sequences: int, width: int) -> list[SequenceInput]:
    """Sequences with the same context, then rows of their own; the last has fewer rows than the others."""
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    inputs = []
    for index in range(num_sequences):
        table = BlockTable(allocator)
        table.reserve(len(CONTEXT) + width)
        runner.run([SequenceInput(CONTEXT, 0, table.block_ids, 0)])
        count = max(1, width - 1) if index and index == num_sequences - 1 else width
        tokens = [(7 * index + 3 * row) % 90 + 2 for row in range(count)]
        inputs.append(SequenceInput(tokens, len(CONTEXT), table.block_ids, count - (count > 1)))
    return inputs


BUCKETS = [(n, w) for n in SEQUENCES for w in WIDTHS if n * w <= MAX_ROWS and (n <= 8 or w <= 4)]


@pytest.mark.parametrize(("num_sequences", "width"), BUCKETS)
def test_every_bucket_equals_the_eager_runner(eager: ModelRunner, num_sequences: int, width: int) -> None:
    runner = graphed(eager)
    for count in {num_sequences, num_sequences // 2 + 1}:
        inputs = step(eager, count, width)
        expected = eager.run(inputs).logits
        logits = runner.run(inputs).logits
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert runner.graphs is not None
    assert runner.graphs.buckets == (Bucket(num_sequences, width, False),)


def test_captured_step_leaves_the_cache_as_the_eager_one_does(eager: ModelRunner) -> None:
    inputs = step(eager, 3, 3)
    eager.run(inputs)
    expected = [layer[: -eager.cache.block_size].clone() for layer in eager.cache.layers]
    graphed(eager).run(inputs)
    for layer, before in zip(eager.cache.layers, expected, strict=True):
        torch.testing.assert_close(layer[: -eager.cache.block_size], before, atol=ATOL, rtol=0)


def test_captured_branches_equal_the_plain_forward(eager: ModelRunner, checkpoint: Path) -> None:
    table = BlockTable(BlockAllocator(eager.info.num_blocks, eager.info.block_size))
    table.reserve(len(CONTEXT) + 4)
    eager.run([SequenceInput(CONTEXT, 0, table.block_ids, 0)])
    # Two rows of one branch behind seven tokens, then one that continues them all.
    end = len(CONTEXT)
    branches = (
        branch_visibility(7, end, 1),
        branch_visibility(7, end, 2),
        branch_visibility(end, end + 2, 1),
    )
    runner = graphed(eager)
    logits = runner.run([SequenceInput([41, 42, 43], 0, table.block_ids, 3, branches)]).logits
    model = reference_model(checkpoint)
    expected = [
        reference_logits(model, [*CONTEXT[:7], 41])[-1],
        reference_logits(model, [*CONTEXT[:7], 41, 42])[-1],
        reference_logits(model, [*CONTEXT, 43])[-1],
    ]
    torch.testing.assert_close(logits, torch.stack(expected), atol=ATOL, rtol=0)
    assert runner.graphs is not None and runner.graphs.buckets == (Bucket(1, 3, True),)


def test_trees_from_captured_forwards_keep_the_output(eager: ModelRunner, checkpoint: Path) -> None:
    """Rows and masks of every step differ; the shapes do not. The largest beside its context is too wide."""
    runner = graphed(eager)
    model = reference_model(checkpoint)
    output = reference_greedy(model, CONTEXT, 40)
    info = engine_info(
        "target",
        max_num_batched_tokens=128,
        vocab_size=runner.info.vocab_size,
        block_size=runner.info.block_size,
        num_blocks=runner.info.num_blocks,
    )
    engine = TargetEngine(runner, info, device=torch.device("cpu"))
    for num_nodes in (3, 15, 64):
        session = Session("a", list(CONTEXT), SamplingParams(temperature=0.0, num_prompt_tokens=len(CONTEXT)))
        known = [*output, *[0] * num_nodes]
        drafter = tree_drafter(known, len(CONTEXT), runner.info.vocab_size)
        while len(session.token_ids) < len(CONTEXT) + 24:
            verify(engine, session, drafter(session, num_nodes))
        assert session.token_ids[len(CONTEXT) :][:24] == output[:24]
        assert max(session.accepted) > 1
        engine.check_integrity()
        engine.release(["a"])
    assert runner.graphs is not None
    assert {bucket.width for bucket in runner.graphs.buckets if bucket.has_masks} == {4, 12, 16, 24, 72}


def test_all_buckets_keep_their_logits_in_one_place(eager: ModelRunner) -> None:
    """What a capture gives is kept for ever: with 78 buckets that would be gigabytes."""
    given: list[torch.Tensor] = []

    def capture(work: Work) -> Work:
        given.append(work().logits)
        return work

    graphs = graphed(eager, capture).graphs
    assert graphs is not None
    graphs.prepare([Bucket(1, 1, False), Bucket(2, 3, False), Bucket(64, 8, False), Bucket(1, 2, True)])
    vocab_size = eager.info.vocab_size
    assert [tuple(logits.shape) for logits in given] == [(n, vocab_size) for n in (1, 6, MAX_ROWS, 2)]
    assert {logits.data_ptr() for logits in given} == {given[0].data_ptr()}
    assert given[0].untyped_storage().nbytes() == MAX_ROWS * vocab_size * 4


def test_logits_are_those_of_the_last_step_whatever_its_bucket(eager: ModelRunner) -> None:
    """They are read where forwards write them; whoever keeps them copies."""
    runner = graphed(eager)
    first, *others = step(eager, 3, 1)
    logits = runner.run([first]).logits
    assert torch.equal(runner.run(others).logits[:1], logits)
    assert runner.graphs is not None
    assert runner.graphs.buckets == (Bucket(1, 1, False), Bucket(2, 1, False))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")]
)
def test_a_bucket_without_memory_for_its_capture_runs_as_it_is(
    eager: ModelRunner, error: RuntimeError
) -> None:
    attempts: list[Work] = []

    def capture(work: Work) -> Work:
        attempts.append(work)
        if len(attempts) == 1:
            raise error
        return work

    runner = graphed(eager, capture)
    inputs = step(eager, 2, 2)
    for _ in range(3):
        torch.testing.assert_close(runner.run(inputs).logits, eager.run(inputs).logits, atol=ATOL, rtol=0)
    assert len(attempts) == 1
    assert runner.graphs is not None and runner.graphs.buckets == ()
    runner.run(inputs[:1])
    assert len(attempts) == 2 and runner.graphs.buckets == (Bucket(1, 2, False),)


def test_a_capture_that_fails_otherwise_is_an_error(eager: ModelRunner) -> None:
    def capture(work: Work) -> Work:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphed(eager, capture).run(step(eager, 1, 1))


def test_capture_itself_writes_to_the_spare_block_only(eager: ModelRunner) -> None:
    before = [layer[: -eager.cache.block_size].clone() for layer in eager.cache.layers]
    runs: list[int] = []

    def capture(work: Work) -> Work:
        work()
        runs.append(1)
        return work

    runner = graphed(eager, capture)
    assert runner.graphs is not None
    runner.graphs.prepare([Bucket(4, 2, False), Bucket(2, 1, False), Bucket(4, 2, False)])
    assert len(runs) == 2
    for layer, kept in zip(eager.cache.layers, before, strict=True):
        assert torch.equal(layer[: -eager.cache.block_size], kept)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((1,), Bucket(1, 1, False)),
        ((9,), Bucket(1, 12, False)),
        ((1, 2, 1), Bucket(4, 2, False)),
        ((33,), Bucket(1, 48, False)),
        ((65,), Bucket(1, 72, False)),
        ((73,), None),
        ((32,) * 17, None),
        ((1,) * 65, None),
        ((8,) * 64, Bucket(64, 8, False)),
    ],
)
def test_bucket_is_the_smallest_that_fits(widths: Sequence[int], expected: Bucket | None) -> None:
    assert bucket_for([SequenceInput([2] * width, 0, [0], 1) for width in widths]) == expected


@pytest.mark.parametrize("name", ["varlen", "triton"])
def test_attention_for_cuda_alone_is_refused_on_cpu(checkpoint: Path, name: str) -> None:
    config = EngineConfig(model=str(checkpoint), device="cpu", attention=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"attention is '{name}', which does not work here"):
        build_runner(config, role="target")


def test_branches_behind_the_longest_sequence_run_as_they_are(eager: ModelRunner) -> None:
    """Branches lie behind their sequence, which may have every token that the model allows."""
    max_model_len = eager.info.max_model_len
    allocator = BlockAllocator(eager.info.num_blocks, eager.info.block_size)
    table = BlockTable(allocator)
    table.reserve(max_model_len + 4)
    tokens = [(7 * index) % 90 + 2 for index in range(max_model_len - 1)]
    eager.run([SequenceInput(tokens, 0, table.block_ids, 0)])
    branches = (
        branch_visibility(5, max_model_len, 1),
        branch_visibility(9, max_model_len + 1, 1),
    )
    inputs = [SequenceInput([41, 42], 0, table.block_ids, 2, branches)]
    runner = graphed(eager)
    assert torch.equal(runner.run(inputs).logits, eager.run(inputs).logits)
    assert runner.graphs is not None and runner.graphs.buckets == ()
    last = [SequenceInput([41], max_model_len - 1, table.block_ids, 1)]
    torch.testing.assert_close(runner.run(last).logits, eager.run(last).logits, atol=ATOL, rtol=0)
    assert runner.graphs.buckets == (Bucket(1, 1, False),)


@pytest.mark.parametrize(
    ("max_num_seqs", "counts"), [(1, ()), (2, (2,)), (9, (2, 4, 8, 16)), (200, (2, 4, 8, 16, 32, 64))]
)
def test_likely_forwards_are_prepared_and_those_of_one_sequence_first(
    max_num_seqs: int, counts: tuple[int, ...]
) -> None:
    target, draft = (prepared_buckets(role, max_num_seqs) for role in ("target", "draft"))
    assert target[:8] == [Bucket(1, width, False) for width in range(1, 9)]
    assert draft[8:18] == [Bucket(1, width, True) for width in (*range(1, 9), 12, 16)]
    several = [Bucket(count, width, False) for count in counts for width in range(1, 9)]
    assert target[8:] == draft[18:] == several
