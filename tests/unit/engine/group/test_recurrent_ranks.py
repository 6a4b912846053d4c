"""Ranks share the heads of recurrent layers, and each keeps the states of its own."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import DraftTokens
from specray.engine.cache.state_pool import StatePool
from specray.engine.runner.assembly import build_runner
from specray.types import SamplingParams
from tests.unit.engine.group.group_ranks import DEADLINE_S, join, running_ranks
from tests.unit.engine.harness import Session, verify_all
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model, write_family
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_config, target_over

pytestmark = pytest.mark.slow

PROMPTS = [[(11 * i * i + 3 * i) % 90 + 2 for i in range(75)], [5, 7]]
NUM_TOKENS = 20
NAMES = [
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe",
    "olmo_hybrid",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1-normed",
    "lfm3",
    "kimi_linear",
    "bailing_hybrid",
    "nemotron_h-latent",
]


def serve_ranks(
    rank: int, meeting: Queue[str], answers: Queue[Any], cases: list[tuple[str, list[list[int]]]]
) -> None:
    """One group per family; the leader verifies drafts right and wrong, of two requests that take turns."""
    for path, outputs in cases:
        group = join(rank, meeting, silence_timeout_s=60)
        runner = build_runner(
            cpu_config(path, max_model_len=128, max_num_seqs=3, snapshot_memory_gib=0.001),
            role="target",
            parallel=group,
        )
        assert isinstance(runner.states, StatePool)
        for layer in runner.states.layers:
            layer.fill(float("nan"))
        if rank > 0:
            runner.follow()
        else:
            answers.put(lead(runner, outputs))
        runner.close()


def lead(runner: Any, outputs: list[list[int]]) -> list[list[int]]:
    engine = target_over(runner, max_num_seqs=2, max_model_len=128, max_num_batched_tokens=64)
    greedy = SamplingParams(temperature=0.0)
    sessions = [
        Session(str(index), list(prompt), replace(greedy, num_prompt_tokens=len(prompt)))
        for index, prompt in enumerate(PROMPTS)
    ]
    for round_id in range(9):
        drafts = []
        for index, session in enumerate(sessions):
            start = len(session.token_ids) - len(PROMPTS[index])
            num_right = (round_id + index) % 4
            tokens = outputs[index][start : start + 3]
            drafts.append(
                DraftTokens(tuple((token + (i >= num_right)) % 96 for i, token in enumerate(tokens)))
            )
        verify_all(engine, sessions, drafts)
        engine.check_integrity()
        if round_id == 4:
            # As one that was lost: it goes on in the slot of another, from a snapshot or anew.
            engine.release(["0", "1"])
            for session in reversed(sessions):
                session.target_len = 0
    assert engine.info.num_prefix_cache_hits == 64
    return [session.token_ids[len(prompt) :] for session, prompt in zip(sessions, PROMPTS, strict=True)]


@pytest.mark.timeout(900)
def test_two_ranks_say_what_generate_says(tmp_path: Path) -> None:
    cases = []
    for name in NAMES:
        path = write_family(tmp_path / name, FAMILIES[name])
        model = reference_model(path)
        cases.append((str(path), [reference_greedy(model, prompt, NUM_TOKENS + 9) for prompt in PROMPTS]))
    with running_ranks(serve_ranks, cases) as (_, answers):
        for _, outputs in cases:
            found = answers.get(timeout=DEADLINE_S)
            assert [each[:NUM_TOKENS] for each in outputs] == [each[:NUM_TOKENS] for each in found]
