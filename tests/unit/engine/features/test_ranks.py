"""A target of two ranks, whose leader alone drafts, says what one of one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.engine.build import build_target_engine
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.feature_ranks import converse, run_rank
from tests.unit.engine.group.group_ranks import DEADLINE_S, end_well, running_ranks
from tests.unit.engine.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow


THREE_BLOCKS = 3 * 96 * (3 * 2 * 8 * 4 + 256) / 2**30
"""GiB: three blocks of 96 tokens, each K/V of 3 layers, one head of 8, and 256 bytes of the drafter."""


def configuration(path: Path, drafter: Path, size: int, **changes: Any) -> Config:
    engine = {
        "model": str(path), "drafter": str(drafter), "dtype": "float32", "device": "cpu", "num_threads": 1,
        "max_model_len": 96, "max_num_seqs": 4, "profile_s": 0, "tensor_parallel_size": size,
        **changes,
    }  # fmt: skip
    return parse_config({"target": engine})


def test_the_leader_alone_reads_the_drafter(tmp_path: Path) -> None:
    """With the target's own embedding and head, of which each rank has a part.

    The follower has no file of the drafter, whose features decide how many blocks there are, and make the
    target's last layer compute all rows.
    """
    path = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=3, vocab_size=96)
    tensors, config = official(eagle3_weights(has_head=False), draft_vocab_size=None)
    del tensors["d2t"], tensors["t2d"]
    drafter = write(tmp_path / "head", tensors, config)
    together = [
        configuration(path, directory, 2, cache_memory_gib=THREE_BLOCKS)
        for directory in (drafter, tmp_path / "nowhere")
    ]
    with running_ranks(run_rank, together) as (ranks, answers):
        alone = converse(build_target_engine(configuration(path, drafter, 1)))
        said, size, name, num_blocks = answers.get(timeout=3 * DEADLINE_S)
        end_well(ranks)
    assert (size, name, num_blocks) == (2, "head", 3)
    assert said == alone
    assert all(len(round_said[-1]) == 3 for round_said in said)
