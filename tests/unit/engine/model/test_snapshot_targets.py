"""Targets with recurrent layers and a warm prefix cache give the bits of a cold one, where they must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.cache.state_pool import StatePool
from specray.engine.runner.runner import ModelRunner
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, Verdict, VerifyItem
from tests.pairwise import pairs
from tests.unit.engine.harness import Session, verify
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_model,
    write_family,
)
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner, info_of

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(temperature=0.0, num_logprobs=3)
MAX_LEN = 640


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 31 + 11 * i * i + 3 * i) % 90 + 2 for i in range(count)]


def write_long(path: Path, name: str) -> Path:
    """A tiny checkpoint with room for longer prompts."""
    write_family(path, FAMILIES[name])
    config = json.loads((path / "config.json").read_text())
    limit = "model_max_length" if "model_max_length" in config else "max_position_embeddings"
    (path / "config.json").write_text(json.dumps({**config, limit: MAX_LEN}))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5")


def make_runner(checkpoint: Path, **changes: object) -> ModelRunner:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 4, "snapshot_memory_gib": 0.002}
    return cpu_runner(checkpoint, **{**sizes, **changes})


def make_engine(runner: ModelRunner, budget: int = 512) -> TargetEngine:
    """Over states and snapshots that hold NaN where nothing was written."""
    assert isinstance(runner.states, StatePool) and runner.states.num_snapshots
    for layer in runner.states.layers:
        layer.fill(float("nan"))
    info = info_of(runner, max_num_seqs=3, max_model_len=MAX_LEN, max_num_batched_tokens=budget)
    return TargetEngine(runner, info, device=torch.device("cpu"))


def answer(
    engine: TargetEngine,
    name: str,
    prompt: Sequence[int],
    *,
    borders: Sequence[int] = (),
    chunk: int | None = None,
    num_rounds: int = 3,
) -> tuple[list[object], int]:
    """What a request's rounds say, with logprobs, and how many tokens were found."""
    sampling = replace(SAMPLING, num_prompt_tokens=len(prompt), message_borders=tuple(borders))
    session = Session(name, list(prompt), sampling)
    found = -engine.info.num_prefix_cache_hits
    while chunk is not None and len(prompt) - session.target_len > chunk:
        # As the Router has it: the first one brings all, so that the cache takes no room of the step.
        start = session.target_len
        end = len(prompt) - 1 if start == 0 else start + chunk
        item = VerifyItem(name, 0, start, tuple(prompt[start:end]), sample=False)
        if start == 0:
            item = replace(item, sampling=sampling, max_new_tokens=chunk)
        [reply] = engine.verify([item]).replies
        assert isinstance(reply, Verdict)
        session.target_len = end if reply.held_len is None else reply.held_len
    said: list[object] = []
    for _ in range(num_rounds):
        verdict = verify(engine, session, NO_DRAFT)
        said.append((verdict.next_token_id, verdict.logprobs))
    engine.check_integrity()
    engine.release([name])
    return said, found + engine.info.num_prefix_cache_hits


@pairs(dtype=("float32", "bfloat16"), block_size=(16, MAX_LEN), chunk=(None, 100, 37), budget=(512, 70))
def test_behind_prompts_a_warm_cache_gives_the_bits_of_a_cold_one(
    dtype: str, block_size: int, chunk: int | None, budget: int, checkpoint: Path
) -> None:
    """Tokens and logprobs, bit for bit, however prompts are cut: a retry, a branch, a junction twice."""
    runner = make_runner(checkpoint, dtype=dtype, block_size=block_size)
    prompt = tokens(1, 400)
    branch, other, third = (
        [*prompt[:cut], *tokens(seed, 150)] for seed, cut in ((2, 310), (3, 200), (4, 200))
    )
    asked = [prompt, prompt, branch, other, third]
    cold = [answer(make_engine(runner), "cold", each)[0] for each in asked]
    engine, found = make_engine(runner, budget), []
    for number, each in enumerate(asked):
        said, cached = answer(engine, str(number), each, borders=(310,), chunk=chunk)
        assert said == cold[number], number
        found.append(cached)
    assert found == [0, 384, 256, 0, 192]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_a_chat_with_speculation_says_what_the_library_says(name: str, tmp_path: Path) -> None:
    """Eight turns, of which each finds all but 64 tokens and a unit, then a branch and a retry."""
    path = write_long(tmp_path, name)
    engine, model = make_engine(make_runner(path)), reference_model(path)
    history: list[int] = []
    prompt: list[int] = []
    found = []

    def turn(name: str, prompt: list[int], borders: Sequence[int]) -> list[int]:
        right = [*prompt, *reference_greedy(model, prompt, 30)]
        sampling = SamplingParams(
            temperature=0.0, num_prompt_tokens=len(prompt), message_borders=tuple(borders)
        )
        session = Session(name, list(prompt), sampling)
        found.append(-engine.info.num_prefix_cache_hits)
        while len(session.token_ids) < len(prompt) + 20:
            at, num_right = len(session.token_ids), session.round_id % 4
            wrong = [(token + (i >= num_right)) % 96 for i, token in enumerate(right[at : at + 4])]
            verify(engine, session, DraftTokens(tuple(wrong)))
            engine.check_integrity()
        found[-1] += engine.info.num_prefix_cache_hits
        engine.release([name])
        assert session.token_ids == right[: len(session.token_ids)]
        return session.token_ids

    for number in range(8):
        told = len(history)
        prompt = [*history, *tokens(number, 45)]
        history = turn(str(number), prompt, (told, len(prompt)))
        assert found[-1] == max(0, told - 1) // 64 * 64
    last = len(prompt) - 45
    turn("branch", [*prompt[:last], *tokens(9, 50)], ())
    turn("retry", prompt, ())
    assert found[-2:] == [last // 64 * 64, (len(prompt) - 1) // 64 * 64]


def test_two_sequences_of_one_step_leave_their_own_snapshots(checkpoint: Path) -> None:
    engine = make_engine(make_runner(checkpoint))
    prompts = [tokens(1, 150), tokens(2, 220)]
    cold = [answer(make_engine(make_runner(checkpoint)), "cold", each, num_rounds=1)[0] for each in prompts]
    items = [
        VerifyItem(
            str(number),
            1,
            0,
            tuple(each),
            sampling=replace(SAMPLING, num_prompt_tokens=len(each), message_borders=(70, 130)),
        )
        for number, each in enumerate(prompts)
    ]
    for number, reply in enumerate(engine.verify(items).replies):
        assert isinstance(reply, Verdict) and (reply.next_token_id, reply.logprobs) == cold[number][0]
    assert engine.info.num_snapshots_held == 2 + 3
    for number, prompt in enumerate(prompts):
        for cut in (70, 130, len(prompt)):
            again = [*prompt[:cut], *tokens(7, 33)][: max(cut, cut + 33)]
            expected, _ = answer(make_engine(make_runner(checkpoint)), "cold", again)
            found, cached = answer(engine, f"{number} {cut}", again)
            assert found == expected and cached == cut // 64 * 64
