"""Trees of any shape under verification: the longest right path is kept, and the cache holds its tokens."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.draft_tokens import DraftTokens
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, TokenLogprobs, Verdict
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    Drafter,
    Session,
    SlotRunner,
    commit,
    model_logits,
    target_only,
    toy_target,
    verify,
    verify_item,
)
from tests.unit.engine.samplings import (
    BAD_WORDS,
    GREEDY,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    SAMPLINGS,
    assert_all_free,
    expected_output,
    session,
)
from tests.unit.engine.trees.random_trees import Shape, num_kept, shaped_drafter, shapes

pytestmark = pytest.mark.slow

ALL_SAMPLINGS = {
    **SAMPLINGS,
    "bad-words": BAD_WORDS,
    "greedy-bad-words": replace(BAD_WORDS, temperature=0.0),
}
ROUNDS = st.lists(shapes(), min_size=1, max_size=5)


@functools.cache
def output_after(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """The next 60 tokens of the target alone."""
    return tuple(target_only(lambda prefix: model_logits(TARGET, prefix), prompt, sampling, 60))


def assert_cache_holds_its_tokens(target: TargetEngine, runner: SlotRunner) -> None:
    """Every computed token of every sequence lies where the sequence has it, once pending moves are done."""
    moves = runner.pending_moves
    slots = list(runner.slots)
    for source, destination in zip(moves.sources, moves.destinations, strict=True):
        slots[destination] = runner.slots[source]
    for sequence in target.table.sequences.values():
        block_ids = sequence.block_table.block_ids
        size = target.info.block_size
        held = [slots[block_ids[i // size] * size + i % size] for i in range(sequence.num_computed_tokens)]
        assert held == sequence.token_ids[: sequence.num_computed_tokens]


@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("sampling", ALL_SAMPLINGS.values(), ids=ALL_SAMPLINGS)
@pytest.mark.parametrize("block_size", [4, 96])
@given(rounds=ROUNDS)
def test_output_is_the_targets_alone_with_any_tree(
    block_size: int, sampling: SamplingParams, rounds: list[Shape]
) -> None:
    output = expected_output(sampling, NUM_OUTPUT + 15)
    target, runner = toy_target(block_size=block_size, num_blocks=1600 // block_size)
    current = session(sampling)
    drafter = shaped_drafter(rounds, output, len(PROMPT), VOCAB_SIZE)
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        ahead = output[len(current.token_ids) - len(PROMPT) :]
        draft = drafter(current, 0)
        verdict = verify(target, current, draft)
        assert verdict.num_accepted_tokens == num_kept(draft, ahead)
        target.check_integrity()
        assert_cache_holds_its_tokens(target, runner)
    assert current.token_ids[len(PROMPT) :][:NUM_OUTPUT] == output[:NUM_OUTPUT]
    assert_all_free(target)


@settings(max_examples=10, deadline=None)
@given(rounds=ROUNDS)
def test_logprobs_follow_the_path_that_is_kept(rounds: list[Shape]) -> None:
    sampling = replace(PROCESSED, num_logprobs=2)
    output = expected_output(sampling, NUM_OUTPUT + 15)
    target, _ = toy_target()
    current = session(sampling)
    drafter = shaped_drafter(rounds, output, len(PROMPT), VOCAB_SIZE)
    logprobs: list[TokenLogprobs] = []
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        logprobs += verify(target, current, drafter(current, 0)).logprobs
    tokens = current.token_ids
    for place, entry in enumerate(logprobs, start=len(PROMPT)):
        row = model_logits(TARGET, tokens[:place])[None]
        assert (entry,) == token_logprobs(row, tokens[place : place + 1], 2)


@settings(max_examples=10, deadline=None)
@given(rounds=ROUNDS, budget=st.integers(3, 20))
def test_a_tree_that_is_computed_in_pieces_is_the_same_tree(rounds: list[Shape], budget: int) -> None:
    output = expected_output(GREEDY, NUM_OUTPUT + 15)
    target, runner = toy_target(max_num_batched_tokens=budget)
    current = session(GREEDY)
    drafter = shaped_drafter(rounds, output, len(PROMPT), VOCAB_SIZE)
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        verify(target, current, drafter(current, 0))
        assert_cache_holds_its_tokens(target, runner)
    assert current.token_ids[len(PROMPT) :][:NUM_OUTPUT] == output[:NUM_OUTPUT]


@settings(max_examples=10, deadline=None)
@given(rounds=st.lists(ROUNDS, min_size=3, max_size=3))
def test_sequences_with_trees_and_chains_share_steps_and_may_be_lost(rounds: list[list[Shape]]) -> None:
    """Next to each other: trees, a chain, prompts in pieces; one is released in between, two have one id."""
    target, runner = toy_target(max_num_batched_tokens=48)
    sessions = [
        Session(name, (PROMPT * 3)[: 9 + 5 * i], replace(sampling, num_prompt_tokens=9 + 5 * i))
        for i, (name, sampling) in enumerate(zip("abcd", SAMPLINGS.values(), strict=True))
    ]
    outputs = [list(output_after(tuple(each.token_ids), each.sampling)) for each in sessions]
    drafters: list[Drafter] = [
        shaped_drafter(shape, output, len(each.token_ids), VOCAB_SIZE)
        for shape, output, each in zip(rounds, outputs[:3], sessions[:3], strict=True)
    ]
    drafters.append(lambda current, count: DraftTokens(tuple(outputs[3][len(current.token_ids) - 24 :][:2])))
    for index in range(9):
        drafted = [draft(each, 0) for draft, each in zip(drafters, sessions, strict=True)]
        items = [verify_item(each, draft) for each, draft in zip(sessions, drafted, strict=True)]
        replies = target.verify([*items, items[0]]).replies
        # An item that is sent twice, also within one batch, gets the same verdict.
        assert replies[0] == replies[4]
        for each, draft, reply in zip(sessions, drafted, replies[:4], strict=True):
            assert isinstance(reply, Verdict)
            commit(each, draft, reply)
        target.check_integrity()
        assert_cache_holds_its_tokens(target, runner)
        if index == 4:
            target.release(["b"])
            sessions[1].target_len = 0
    for each, output in zip(sessions, outputs, strict=True):
        num_prompt = each.sampling.num_prompt_tokens
        assert each.token_ids[num_prompt:] == output[: len(each.token_ids) - num_prompt]


@settings(max_examples=6, deadline=None)
@pytest.mark.parametrize("block_size", [4, 16, 24, 96])
@given(rounds=ROUNDS)
def test_what_trees_wrote_serves_the_next_request_from_the_prefix_cache(
    block_size: int, rounds: list[Shape]
) -> None:
    """Also when the first is released while K/V of its last verdict are still to be moved."""
    target, runner = toy_target(block_size=block_size, num_blocks=480 // block_size)
    prompt = (PROMPT * 3)[:20]
    output = list(output_after(tuple(prompt), GREEDY))
    sampling = replace(GREEDY, num_prompt_tokens=20)
    first = Session("a", list(prompt), sampling)
    drafter = shaped_drafter(rounds, output, 20, VOCAB_SIZE)
    while len(first.token_ids) < 20 + 26:
        verify(target, first, drafter(first, 0))
    target.release(["a"])
    for name, length in (("b", 44), ("c", 30)):
        next_prompt = first.token_ids[:length]
        second = Session(name, list(next_prompt), replace(GREEDY, num_prompt_tokens=length))
        again = shaped_drafter(rounds, output[length - 20 :], length, VOCAB_SIZE)
        num_cached = 0
        while len(second.token_ids) < 52:
            num_cached += verify(target, second, again(second, 0)).num_cached_tokens
            target.check_integrity()
            assert_cache_holds_its_tokens(target, runner)
        assert second.token_ids == [*prompt, *output][: len(second.token_ids)]
        assert num_cached >= (length - 1) // 16 * 16 - 16
    target.release(["b", "c"])
    assert target.info.num_blocks_in_use == 0
