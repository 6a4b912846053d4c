"""Every family of the zoo is served with the tokens of ``generate``, or refused with its sentence."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.model.library import LibraryConfig
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError
from specray.types import SamplingParams
from tests.unit.engine.group.group_ranks import DEADLINE_S, join, running_ranks
from tests.unit.engine.harness import Session, generate_serial, target_only
from tests.unit.engine.model.checkpoints import (
    family_config,
    reference_greedy,
    reference_logits,
    reference_model,
    write_family,
)
from tests.unit.engine.model.zoo import FAMILIES, QUICK
from tests.unit.engine.runners import cpu_config, target_over
from tests.unit.engine.trees.drafters import adversarial_drafter, tree_drafter

pytestmark = pytest.mark.slow

SHORT, LONG = [5, 7, 9, 11, 13], [(11 * i * i + 3 * i) % 90 + 2 for i in range(45)]
NUM_TOKENS = 20
ATOL = 5e-4
"""Largest difference of a logit, in float32; their deviation is about 1.7, for some families 10."""

NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.zoo) for name in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    write_family(tmp_path, family)
    dtype = "float32" if family.refusal is None else "bfloat16"
    config = cpu_config(tmp_path, dtype=dtype, max_model_len=family.max_model_len, max_num_seqs=2)
    if family.refusal is not None:
        with pytest.raises(ConfigError) as caught:
            build_runner(config, role="target")
        message = str(caught.value)
        assert family.refusal in message and "\n" not in message
        return
    runner = build_runner(config, role="target")
    model = reference_model(tmp_path)
    for prompt in (SHORT, LONG):
        tokens = greedy(runner, prompt, NUM_TOKENS)
        assert tokens == reference_greedy(model, prompt, NUM_TOKENS)
        # As one prompt, and not only the last token of it.
        table = new_table(runner, len(prompt))
        logits = runner.run([SequenceInput(prompt, 0, table.block_ids, len(prompt))]).logits
        assert float((logits - reference_logits(model, prompt)).abs().max()) < ATOL
    check_speculation(runner, model)


def serve_ranks(rank: int, meeting: Queue[str], answers: Queue[Any], paths: list[str]) -> None:
    """One group per family, one after the other in the same processes."""
    for path in paths:
        group = join(rank, meeting, silence_timeout_s=60)
        config = cpu_config(path, max_model_len=128, max_num_seqs=2)
        runner = build_runner(config, role="target", parallel=group)
        if rank > 0:
            runner.follow()
        else:
            middle = len(LONG) // 2
            chunks = ((0, LONG[:middle]), (middle, LONG[middle:]))
            logits = [runner.run([SequenceInput(new, at, [0], len(new))]).logits for at, new in chunks]
            answers.put((torch.cat(logits).tolist(), greedy(runner, LONG, NUM_TOKENS)))
        runner.close()


@pytest.mark.zoo
@pytest.mark.timeout(1200)
def test_two_ranks(tmp_path: Path) -> None:
    """Of every family for which docs/models.md says that several ranks serve it."""
    paths = []
    for name, family in FAMILIES.items():
        config = family_config(family)
        is_shared = LibraryConfig(config, config.get_text_config()).can_be_shared("auto")
        if family.refusal is None and is_shared:
            paths.append(str(write_family(tmp_path / name, family)))
    assert len(paths) > 60
    with running_ranks(serve_ranks, paths) as (_, answers):
        for path in paths:
            logits, tokens = answers.get(timeout=DEADLINE_S)
            model = reference_model(Path(path))
            assert tokens == reference_greedy(model, LONG, NUM_TOKENS), path
            difference = torch.tensor(logits) - reference_logits(model, LONG)
            assert float(difference.abs().max()) < ATOL, path


def check_speculation(runner: ModelRunner, model: Any) -> None:
    """Trees of right and wrong nodes, and chains that are always wrong, give what the target says alone."""
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(seed=5)):
        sampling = replace(sampling, num_prompt_tokens=len(LONG))
        output = target_only(
            lambda prefix: reference_logits(model, list(prefix))[-1], LONG, sampling, NUM_TOKENS + 10
        )
        accepted: list[int] = []
        for drafter in (tree_drafter, adversarial_drafter):
            engine = target_over(runner, max_model_len=runner.info.max_model_len)
            session = Session("a", list(LONG), sampling)
            draft = drafter(output, len(LONG), runner.info.vocab_size)
            assert generate_serial(engine, draft, session, NUM_TOKENS, 9) == output[:NUM_TOKENS]
            engine.check_integrity()
            accepted += session.accepted
        assert max(accepted) > 2


def new_table(runner: ModelRunner, num_tokens: int) -> BlockTable:
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(num_tokens)
    return table


def greedy(runner: ModelRunner, prompt: list[int], num_tokens: int) -> list[int]:
    table = new_table(runner, len(prompt) + num_tokens)
    tokens, num_computed = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        new = tokens[num_computed:]
        logits = runner.run([SequenceInput(new, num_computed, table.block_ids, 1)]).logits
        num_computed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]
