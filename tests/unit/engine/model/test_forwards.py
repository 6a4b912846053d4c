"""Both forwards compute what the library computes: whole, in chunks, in ragged batches, after a rollback."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specray.engine.attention.base import LayeredAttention
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder import DecoderForward
from specray.engine.runner.runner import ModelRunner
from specray.engine.visibility import branch_visibility
from tests.unit.engine.model.checkpoints import (
    DECODER,
    HF,
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from tests.unit.engine.runners import cpu_runner

pytestmark = pytest.mark.slow

PROMPT = [5, 7, 9, 11, 13, 2, 4, 60, 33]
OTHER = [8, 3, 3, 90]
ATOL = 2e-5
"""Float32 logits here have a standard deviation of about 1.7."""


@pytest.fixture(params=[*DECODER, *HF, "llama/hf", "mistral-windowed/hf"])
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, str]:
    """A checkpoint, and the forward that is expected to run it."""
    name, _, forced = request.param.partition("/")
    return checkpoint(name), forced or ("decoder" if name in DECODER else "hf")


@functools.cache
def make_runner(case: tuple[Path, str], block_size: int | None = None, dtype: str = "float32") -> ModelRunner:
    """One for all tests of a case: what another has left in the cache is nobody's."""
    path, forward = case
    runner = cpu_runner(path, forward=forward, dtype=dtype, block_size=block_size, max_num_seqs=4)
    assert runner.info.forward == forward
    return runner


def run_one(
    runner: ModelRunner,
    table: BlockTable,
    token_ids: Sequence[int],
    start: int,
    num_logits: int | None = None,
) -> torch.Tensor:
    table.reserve(start + len(token_ids))
    wanted = len(token_ids) if num_logits is None else num_logits
    return runner.run([SequenceInput(token_ids, start, table.block_ids, wanted)]).logits


def new_table(runner: ModelRunner) -> BlockTable:
    return BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))


def shuffled_table(runner: ModelRunner) -> BlockTable:
    """Blocks that do not follow each other, so that nothing is one view."""
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    held = allocator.allocate(12)
    allocator.free(held[::2])
    allocator.free(held[1::2])
    return BlockTable(allocator)


@pytest.mark.parametrize("block_size", [None, 3])
def test_greedy_equals_generate(case: tuple[Path, str], block_size: int | None) -> None:
    runner = make_runner(case, block_size)
    expected = reference_greedy(reference_model(case[0]), PROMPT, 24)
    table, tokens, num_computed = new_table(runner), list(PROMPT), 0
    while len(tokens) < len(PROMPT) + 24:
        logits = run_one(runner, table, tokens[num_computed:], num_computed, 1)
        num_computed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    assert tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("block_size", [None, 3])
def test_chunks_equal_the_whole(case: tuple[Path, str], block_size: int | None) -> None:
    runner = make_runner(case, block_size)
    expected = reference_logits(reference_model(case[0]), PROMPT)
    table = new_table(runner) if block_size is None else shuffled_table(runner)
    chunks = [run_one(runner, table, PROMPT[a:b], a) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("block_size", [None, 3])
def test_ragged_batch_equals_single_sequences(case: tuple[Path, str], block_size: int | None) -> None:
    runner = make_runner(case, block_size)
    model = reference_model(case[0])
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    tables = [BlockTable(allocator) for _ in range(3)]
    for table in tables:
        table.reserve(len(PROMPT) + 1)
    runner.run([SequenceInput(PROMPT[:6], 0, tables[0].block_ids, 0)])
    # One sequence goes on with three rows, one begins, one begins and wants no logits.
    logits = runner.run(
        [
            SequenceInput(PROMPT[6:], 6, tables[0].block_ids, 2),
            SequenceInput(OTHER, 0, tables[1].block_ids, 4),
            SequenceInput([17, 18], 0, tables[2].block_ids, 0),
        ]
    ).logits
    expected = torch.cat([reference_logits(model, PROMPT)[-2:], reference_logits(model, OTHER)])
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
    # The sequence without logits filled its cache all the same.
    after = runner.run(
        [SequenceInput([40], 2, tables[2].block_ids, 1), SequenceInput([41], 4, tables[1].block_ids, 1)]
    ).logits
    expected = torch.stack(
        [reference_logits(model, [17, 18, 40])[-1], reference_logits(model, [*OTHER, 41])[-1]]
    )
    torch.testing.assert_close(after, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("block_size", [None, 3])
def test_branches_equal_sequences_of_their_own(case: tuple[Path, str], block_size: int | None) -> None:
    """Three branches of one sequence share its K/V, grow step by step, and leave it as it was."""
    runner = make_runner(case, block_size)
    model = reference_model(case[0])
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    table, other = BlockTable(allocator), BlockTable(allocator)
    table.reserve(len(PROMPT) + 9)
    other.reserve(len(OTHER) + 1)
    runner.run([SequenceInput(PROMPT, 0, table.block_ids, 0), SequenceInput(OTHER, 0, other.block_ids, 0)])
    length = len(PROMPT)
    branches = [(length, length, [40, 41, 42]), (2, length + 3, [50, 51, 52]), (5, length + 6, [60, 61])]
    for step in range(3):
        alive = [branch for branch in branches if step < len(branch[2])]
        rows = tuple(branch_visibility(trunk_len, place, step + 1) for trunk_len, place, _ in alive)
        drawn = [tokens[step] for _, _, tokens in alive]
        inputs = [SequenceInput(drawn, 0, table.block_ids, len(rows), rows)]
        sequences = [[*PROMPT[:trunk_len], *tokens[: step + 1]] for trunk_len, _, tokens in alive]
        if step == 1:
            inputs.append(SequenceInput([70], len(OTHER), other.block_ids, 1))
            sequences.append([*OTHER, 70])
        expected = torch.stack([reference_logits(model, tokens)[-1] for tokens in sequences])
        torch.testing.assert_close(runner.run(inputs).logits, expected, atol=ATOL, rtol=0)
    after = run_one(runner, table, [40], length)
    torch.testing.assert_close(after[-1], reference_logits(model, [*PROMPT, 40])[-1], atol=ATOL, rtol=0)


@pytest.mark.parametrize("block_size", [None, 3])
def test_truncated_and_overwritten_equals_fresh(case: tuple[Path, str], block_size: int | None) -> None:
    runner = make_runner(case, block_size)
    table = new_table(runner)
    run_one(runner, table, PROMPT, 0)
    table.truncate(5)
    tail = [77, 78, 79]
    logits = run_one(runner, table, tail, 5)
    expected = reference_logits(reference_model(case[0]), [*PROMPT[:5], *tail])[-3:]
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_gathered_blocks_of_layers_with_rotary_tables_of_their_own(
    checkpoint: Callable[[str], Path], name: str
) -> None:
    """As on CUDA: from tensors that describe the step, whose kinds of layers share nothing."""
    runner = cpu_runner(checkpoint(name), attention="gather", block_size=4, max_num_seqs=1)
    assert isinstance(runner.forward, DecoderForward)
    assert isinstance(runner.forward.attention, LayeredAttention)
    table = new_table(runner)
    chunks = [run_one(runner, table, PROMPT[a:b], a) for a, b in ((0, 4), (4, 5), (5, 9))]
    expected = reference_logits(reference_model(checkpoint(name)), PROMPT)
    torch.testing.assert_close(torch.cat(chunks), expected, atol=ATOL, rtol=0)


def test_no_logits_wanted_gives_none(case: tuple[Path, str]) -> None:
    runner = make_runner(case)
    assert run_one(runner, new_table(runner), PROMPT, 0, 0).shape == (0, runner.info.vocab_size)


def test_bfloat16_stays_close_to_float32(case: tuple[Path, str]) -> None:
    expected = reference_logits(reference_model(case[0]), PROMPT)
    library = reference_logits(reference_model(case[0], torch.bfloat16), PROMPT)
    runner = make_runner(case, dtype="bfloat16")
    logits = run_one(runner, new_table(runner), PROMPT, 0)
    assert logits.dtype == torch.float32
    ours, theirs = ((x - expected).square().mean().sqrt() for x in (logits, library))
    assert ours < 1.5 * theirs + 1e-3


def test_the_last_token_of_the_longest_sequence(checkpoint: Callable[[str], Path]) -> None:
    """Position max_model_len - 1 has a rotary row and a slot of its own."""
    path = checkpoint("llama")
    tokens = [(7 * i) % 90 + 2 for i in range(128)]
    runner = make_runner((path, "decoder"))
    assert runner.info.max_model_len == 128
    logits = run_one(runner, new_table(runner), tokens, 0, 1)
    expected = reference_logits(reference_model(path), tokens)[-1:]
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


def test_copied_tokens_serve_another_sequence(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama")
    runner = make_runner((path, "decoder"))
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    first, second = BlockTable(allocator), BlockTable(allocator)
    run_one(runner, first, PROMPT, 0)
    second.reserve(len(PROMPT))
    runner.copy_tokens(first.block_ids, second.block_ids, 6)
    logits = run_one(runner, second, [50], 6)
    expected = reference_logits(reference_model(path), [*PROMPT[:6], 50])[-1:]
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


def test_configuration_that_only_the_library_reads(tmp_path: Path) -> None:
    """Its rotary embeddings come from the library; its weights go straight from their file to the decoder."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    path = write_checkpoint(tmp_path, "qwen3", rope_parameters=rope)
    runner = make_runner((path, "decoder"))
    expected = reference_logits(reference_model(path), PROMPT)
    logits = run_one(runner, new_table(runner), PROMPT, 0)
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
