"""Engines with a warm prefix cache write what they write with a cold one, and compute less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.target.engine import TargetEngine
from specray.types import ItemFailed, SamplingParams, Verdict, VerifyItem
from tests.unit.engine.harness import (
    CLOSE,
    TARGET,
    Session,
    commit,
    engine_info,
    generate_overlapped,
    generate_serial,
    model_logits,
    propose,
    target_only,
    toy_draft,
    toy_target,
    verify_item,
)
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model
from tests.unit.engine.trees.drafters import engine_drafter

GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=40)
COUPLED = SamplingParams(seed=77, num_prompt_tokens=40)
PROMPT = [(7 * i) % 19 + 2 for i in range(40)]
OTHER = [*PROMPT[:33], 5, 6, 7]
NUM_OUTPUT = 24


def expected(prompt: list[int], sampling: SamplingParams, num_output: int = NUM_OUTPUT) -> list[int]:
    return target_only(lambda prefix: model_logits(TARGET, prefix), prompt, sampling, num_output)


def assert_idle(head: TargetEngine | DraftEngine) -> None:
    head.check_integrity()
    assert head.info.num_blocks_in_use == 0


@pytest.mark.parametrize("block_size", [4, 16, 24, 96])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_warm_output_is_the_cold_one(block_size: int, sampling: SamplingParams) -> None:
    target, target_runner = toy_target(block_size=block_size, num_blocks=480 // block_size)
    draft, _ = toy_draft(CLOSE, block_size=block_size, num_blocks=3840 // block_size)
    num_rows = []
    for number, prompt in enumerate((PROMPT, PROMPT, OTHER, PROMPT[:20], [*OTHER, 9, 9])):
        name, before = f"request {number}", target_runner.num_rows
        output = generate_overlapped(
            target, draft, Session(name, list(prompt), sampling), NUM_OUTPUT, 3, lambda n: (2,) * n + (2,)
        )
        assert output == expected(prompt, sampling)
        num_rows.append(target_runner.num_rows - before)
        target.release([name])
        draft.release([name])
        assert_idle(target)
        assert_idle(draft)
    assert num_rows[1] <= num_rows[0] - 24


def test_an_aborted_requests_prefix_serves_the_next() -> None:
    """Released in the middle of a round: draft tokens under verification leave no trace."""
    target, runner = toy_target(block_size=96, num_blocks=4)
    session = Session("a", list(PROMPT), COUPLED)
    wrong = (1, 1, 1, 1)
    for _ in range(3):
        [reply] = target.verify([verify_item(session, DraftTokens(wrong))]).replies
        assert isinstance(reply, Verdict)
        commit(session, DraftTokens(wrong), reply)
    target.release(["a"])
    before = runner.num_rows
    again = Session("b", list(session.token_ids), COUPLED)
    output = generate_serial(target, lambda *_: NO_DRAFT, again, 8, 0)
    assert session.token_ids[40:] + output == expected(PROMPT, COUPLED)[: len(session.token_ids) - 40 + 8]
    assert runner.num_rows - before == len(session.token_ids) % 16 + 7


def test_the_hit_is_told_and_counted() -> None:
    target, _ = toy_target(block_size=96, num_blocks=4)
    [cold] = target.verify([VerifyItem("a", 1, 0, tuple(PROMPT), sampling=GREEDY)]).replies
    [warm] = target.verify([VerifyItem("b", 1, 0, tuple(PROMPT), sampling=GREEDY)]).replies
    assert isinstance(cold, Verdict) and isinstance(warm, Verdict)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert warm.next_token_id == cold.next_token_id
    info = target.info
    assert (info.num_prefix_cache_queries, info.num_prefix_cache_hits) == (80, 32)


def test_without_a_prefix_cache_everything_is_computed() -> None:
    info = engine_info("target", block_size=96, num_blocks=4)
    _, runner = toy_target(block_size=96, num_blocks=4)
    target = TargetEngine(runner, info, device=model_logits(TARGET, []).device, prefix_cache=False)
    for name in "ab":
        target.verify([VerifyItem(name, 1, 0, tuple(PROMPT), sampling=GREEDY)])
    assert runner.num_rows == 80
    assert (target.info.num_prefix_cache_queries, target.info.num_prefix_cache_hits) == (0, 0)
    target.release(["a", "b"])
    assert_idle(target)


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    """Several outputs for one prompt: one goes ahead, the others follow in the same step."""
    prompt = tuple((5 * i) % 17 for i in range(80))
    target, runner = toy_target(block_size=96, num_blocks=8, max_num_batched_tokens=512)
    other = VerifyItem("other", 1, 0, (1, 2, 3), sampling=GREEDY)
    items = [VerifyItem(name, 1, 0, prompt, sampling=GREEDY) for name in "abc"]
    replies = target.verify([*items, other]).replies
    assert [reply.request_id for reply in replies] == ["a", "b", "c", "other"]
    assert [reply.num_cached_tokens for reply in replies if isinstance(reply, Verdict)] == [0, 64, 64, 0]
    assert [sum(len(item.token_ids) for item in step) for step in runner.steps] == [83, 32]
    assert len({reply.next_token_id for reply in replies[:3] if isinstance(reply, Verdict)}) == 1


def test_a_chunk_is_cut_behind_what_may_be_computed() -> None:
    target, runner = toy_target(block_size=96, num_blocks=4)
    target.verify([VerifyItem("a", 1, 0, tuple(PROMPT), sampling=GREEDY)])
    prompt = [*PROMPT[:32], *range(2, 22)]
    chunk = VerifyItem("b", 1, 0, tuple(prompt), sample=False, sampling=GREEDY, max_new_tokens=10)
    before = runner.num_rows
    assert target.verify([chunk]).replies == (Verdict("b", 1, 0, 0, None, held_len=42, num_cached_tokens=32),)
    assert runner.num_rows - before == 10
    [reply] = target.verify([VerifyItem("b", 2, 42, tuple(prompt[42:]))]).replies
    assert isinstance(reply, Verdict)
    assert [reply.next_token_id] == expected(prompt, GREEDY, 1)


@pytest.mark.parametrize("changes", [{"sample": True}, {"max_new_tokens": 0}])
def test_a_limit_is_for_chunks_and_positive(changes: dict[str, Any]) -> None:
    target, _ = toy_target()
    chunk = VerifyItem("a", 1, 0, (1, 2, 3), sample=False, sampling=GREEDY, max_new_tokens=2)
    [reply] = target.verify([replace(chunk, **changes)]).replies
    assert isinstance(reply, ItemFailed) and not reply.is_retriable and "max_new_tokens" in reply.message
    target.check_integrity()


def test_a_draft_finds_prefixes_too() -> None:
    draft, runner = toy_draft(CLOSE, block_size=96, num_blocks=20)
    first = Session("a", list(PROMPT), COUPLED)
    proposed = propose(draft, first, 4)
    draft.release(["a"])
    before = runner.num_rows
    assert propose(draft, Session("b", list(PROMPT), COUPLED), 4) == proposed
    assert runner.num_rows - before == 8 + 3
    draft.release(["b"])
    assert_idle(draft)


# ---- real models in float32


ARCHITECTURES = [
    ("llama", "auto"),
    ("mistral-windowed", "auto"),
    ("qwen3", "auto"),
    ("gpt2", "auto"),
    ("mistral-windowed", "hf"),
]


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [None, 16, 24])
@pytest.mark.parametrize(("name", "forward"), ARCHITECTURES)
def test_models_write_the_same_with_a_warm_cache(
    checkpoint: Callable[[str], Path], name: str, forward: str, block_size: int | None
) -> None:
    path = checkpoint(name)
    options = {"model": str(path), "dtype": "float32", "device": "cpu", "num_threads": 1, "profile_s": 0}
    options |= {"max_num_seqs": 2, "max_model_len": 120, "block_size": block_size, "forward": forward}
    config = parse_config({"target": options, "draft": options})
    target, draft = build_target_engine(config), build_draft_engine(config)
    model = reference_model(path)
    shared = [(11 * i) % 90 + 2 for i in range(50)]
    for number, prompt in enumerate((shared, [*shared[:37], 8, 9], shared, [*shared, 4, 5, 6])):
        session = Session(f"request {number}", list(prompt), GREEDY)
        output = generate_serial(target, engine_drafter(draft), session, 30, 3)
        assert output == reference_greedy(model, prompt, 30)
        for head in (target, draft):
            head.release([session.request_id])
            assert_idle(head)
    # 32 of 39 tokens, 48 of 50 and 48 of 53, or less by one unit where blocks end between.
    for info in (target.info, draft.info):
        assert info.num_prefix_cache_hits >= 120


def salted(name: str, salt: str) -> VerifyItem:
    return verify_item(Session(name, list(PROMPT), replace(GREEDY, cache_salt=salt)), NO_DRAFT)


def test_only_requests_with_equal_salts_share_a_prefix() -> None:
    target, _ = toy_target(block_size=16, num_blocks=30)
    found = []
    for number, salt in enumerate(("", "a", "a", "b", "")):
        [reply] = target.verify([salted(f"request {number}", salt)]).replies
        target.release([f"request {number}"])
        assert isinstance(reply, Verdict)
        found.append(reply.num_cached_tokens)
    assert found == [0, 0, 32, 0, 32]


@pytest.mark.parametrize(("salts", "cached"), [(("a", "b"), [0, 0]), (("a", "a"), [0, 32])])
def test_requests_of_one_step_share_with_equal_salts_only(salts: tuple[str, str], cached: list[int]) -> None:
    target, _ = toy_target(block_size=16, num_blocks=30)
    long = [3, 5] * 33
    items = [
        verify_item(Session(name, long, replace(GREEDY, cache_salt=salt)), NO_DRAFT)
        for name, salt in zip("xy", salts, strict=True)
    ]
    replies = target.verify(items).replies
    found = [reply.num_cached_tokens for reply in replies if isinstance(reply, Verdict)]
    assert found == [each and 64 for each in cached]
