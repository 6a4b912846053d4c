"""A target of two ranks, whose leader alone drafts, says what one of one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.config import Config, parse_config
from specray.engine.build import build_target_engine
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.feature_ranks import DEADLINE_S, converse, run_rank
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.processes import preloaded_context

pytestmark = pytest.mark.slow


def configuration(path: Path, drafter: Path, size: int) -> Config:
    engine = {
        "model": str(path), "drafter": str(drafter), "dtype": "float32", "device": "cpu", "num_threads": 1,
        "max_model_len": 96, "max_num_seqs": 4, "profile_s": 0, "tensor_parallel_size": size,
    }  # fmt: skip
    return parse_config({"target": engine})


def test_the_leader_drafts_alone(tmp_path: Path) -> None:
    """With the target's own embedding and head, of which each rank has a part."""
    path = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=3, vocab_size=96)
    tensors, config = official(eagle3_weights(has_head=False), draft_vocab_size=None)
    del tensors["d2t"], tensors["t2d"]
    drafter = write(tmp_path / "head", tensors, config)
    context = preloaded_context()
    meeting, answered = context.Queue(), context.Queue()
    together = configuration(path, drafter, 2)
    ranks = [context.Process(target=run_rank, args=(rank, meeting, answered, together)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        alone = converse(build_target_engine(configuration(path, drafter, 1)))
        said, size, name = answered.get(timeout=DEADLINE_S)
        for process in ranks:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join(DEADLINE_S)
    assert (size, name) == (2, "head")
    assert said == alone
    assert all(len(round_said[-1]) == 3 for round_said in said)
