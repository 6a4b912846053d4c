"""Lookahead decoding over real models: the window's rows change nothing of what the target says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specray.config import Config, TargetConfig
from specray.draft_tokens import NO_DRAFT, LookaheadBudget
from specray.engine.build import build_target_engine
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, Verdict
from tests.unit.engine.harness import Session, commit, verify_item
from tests.unit.engine.model.checkpoints import reference_logits, reference_model, write_checkpoint

PROMPT = [5, 17, 93, 40, 2, 61, 5, 17, 93, 40]
NUM_OUTPUT = 40
GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))


def target_of(model: Path) -> TargetEngine:
    config = TargetConfig(
        model=str(model), dtype="float32", num_threads=1, profile_s=0, max_model_len=96, max_num_seqs=2
    )
    return build_target_engine(Config(target=config))


def written(
    target: TargetEngine, sampling: SamplingParams, budget: LookaheadBudget | None
) -> tuple[list[int], int]:
    """The output, and the number of accepted draft tokens."""
    current = Session("a", list(PROMPT), sampling)
    offered = NO_DRAFT
    while len(current.token_ids) < len(PROMPT) + NUM_OUTPUT:
        [reply] = target.verify([replace(verify_item(current, offered), lookahead=budget)]).replies
        assert isinstance(reply, Verdict), reply
        commit(current, offered, reply)
        offered = reply.draft
        target.check_integrity()
    target.release(["a"])
    return current.token_ids[len(PROMPT) :][:NUM_OUTPUT], sum(current.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-windowed", "gpt_neox"])
def test_output_is_that_of_plain_forwards(name: str, tmp_path: Path) -> None:
    """By the decoder, with a window of attention, and by the library; greedy, and with noise."""
    directory = write_checkpoint(tmp_path / name, name)
    target, model = target_of(directory), reference_model(directory)
    tokens = list(PROMPT)
    for _ in range(NUM_OUTPUT):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    output, num_accepted = written(target, GREEDY, LookaheadBudget())
    assert output == tokens[len(PROMPT) :]
    # A small random model goes in circles, which the pool knows.
    assert num_accepted > 0
    for seed in range(3):
        sampling = replace(GREEDY, temperature=1.0, seed=seed)
        assert written(target, sampling, LookaheadBudget(3, 4, 2))[0] == written(target, sampling, None)[0]
