"""Two ranks compute with adapters what one process does, and load the same or nothing."""

from __future__ import annotations

from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError
from tests.unit.engine.adapters.files import adapted_runner, put, target_config, write_adapter
from tests.unit.engine.group.group_ranks import answers_of_ranks, join
from tests.unit.engine.model.checkpoints import write_checkpoint

PROMPT = [5, 7, 9, 11, 13, 2]


def steps(runner: ModelRunner) -> torch.Tensor:
    """Logits of prompts with both adapters and none, and of steps after them."""
    slots, found = (1, -1, 0), []
    for start, tokens in ((0, PROMPT), (len(PROMPT), [3, 4])):
        inputs = [
            SequenceInput(tokens, start, [block], len(tokens), adapter_slot=slot)
            for block, slot in enumerate(slots)
        ]
        found.append(runner.run(inputs).logits.clone())
    return torch.cat(found)


def serve_rank(rank: int, meeting: Queue[str], answers: Queue[Any], base: Path, directory: Path) -> None:
    group = join(rank, meeting, silence_timeout_s=60)
    runner = build_runner(target_config(base, directory / str(rank)), role="target", parallel=group)
    if rank > 0:
        runner.follow()
    else:
        assert runner.adapters is not None
        for slot, name in enumerate("ab"):
            put(runner, slot, name)
        logits, refused = steps(runner), []
        for name in ("differs", "absent.there", "absent.here"):
            try:
                put(runner, 1, name)
            except ConfigError as error:
                refused.append(str(error))
        runner.adapters.clear(1)
        answers.put((logits.tolist(), refused, torch.equal(steps(runner), logits)))
    runner.close()


@pytest.mark.parametrize(
    "name",
    [
        "llama-biased-scaled",
        # One key head, which both ranks have; joined weights.
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("phi3", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_compute_what_one_does_and_load_the_same_or_nothing(tmp_path: Path, name: str) -> None:
    base = write_checkpoint(tmp_path / "base", name)
    for seed, adapter in enumerate("ab"):
        for rank in "01":
            write_adapter(tmp_path / rank / adapter, base, seed=seed, rank=2 + seed)
    for seed, rank in enumerate("01"):
        write_adapter(tmp_path / rank / "differs", base, seed=seed)
    write_adapter(tmp_path / "0" / "absent.there", base)
    expected = steps(adapted_runner(base, tmp_path / "0", ("a", "b")))
    [(logits, refused, is_same)] = answers_of_ranks(serve_rank, base, tmp_path)
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=0)
    assert not is_same
    assert [message.split(";")[0] for message in refused] == [
        "the adapter cannot be loaded on all ranks, or has other bytes there",
        "the adapter cannot be loaded on all ranks, or has other bytes there",
        "adapter folder 'absent.here' is not in the directory of adapters",
    ]
