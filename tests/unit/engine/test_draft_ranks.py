"""A draft of two and of four ranks proposes and enumerates what one of one rank does."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.engine.build import build_draft_engine
from tests.unit.engine.draft_ranks import DEADLINE_S, NUM_DRAFTS, Reply, converse, run_rank
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.processes import preloaded_context

pytestmark = pytest.mark.slow

SIZES = (2, 4)


def configuration(path: Path, size: int, block_size: int | None) -> Config:
    engine = {
        "model": str(path), "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 96,
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "profile_s": 0, "block_size": block_size,
    }  # fmt: skip
    return parse_config({"draft": {**engine, "tensor_parallel_size": size}})


def test_ranks_propose_and_enumerate_what_one_does(tmp_path: Path) -> None:
    # 97 tokens do not divide into equal shards. A block holds a sequence in one case, little in the other.
    paths = {
        2: write_checkpoint(tmp_path / "2", "llama", num_key_value_heads=4, vocab_size=97, seed=3),
        4: write_checkpoint(tmp_path / "4", "qwen3", num_key_value_heads=4, seed=4),
    }
    block_sizes = {2: None, 4: 4}
    context = preloaded_context()
    meetings = {size: context.Queue() for size in SIZES}
    answered = context.Queue()
    configs = [configuration(paths[size], size, block_sizes[size]) for size in SIZES]
    ranks = [context.Process(target=run_rank, args=(rank, meetings, answered, configs)) for rank in range(4)]
    for process in ranks:
        process.start()
    try:
        alone = {}
        for size in SIZES:
            draft = build_draft_engine(configuration(paths[size], 1, block_sizes[size]))
            alone[size] = (converse(draft), draft.info)
            draft.check_integrity()
        received: dict[str, dict[int, list[Any]]] = {"blocks": defaultdict(list), "said": defaultdict(list)}
        for _ in range(sum(SIZES) + len(SIZES)):
            kind, size, value = answered.get(timeout=DEADLINE_S)
            received[kind][size].append(value)
        for process in ranks:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0, 0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join(DEADLINE_S)
    for size in SIZES:
        expected, info = alone[size]
        assert info.tensor_parallel_size == 1
        assert_covers_everything(expected)
        assert info.num_prefix_cache_hits > 0
        [(said, num_ranks)] = received["said"][size]
        assert num_ranks == size
        for name, replies in expected.items():
            assert said[name] == replies, f"{name} of {size} ranks"
        # A follower is told which blocks to use: it needs as many as the leader has.
        assert received["blocks"][size] == [received["blocks"][size][0]] * size


def assert_covers_everything(said: dict[str, list[Reply]]) -> None:
    """What is compared is worth comparing."""
    assert any(0 < len(reply) < NUM_DRAFTS for reply in said["short"]), "proposals end early"
    assert all(len(reply) == NUM_DRAFTS for reply in said["serial coupled"])
    assert said["serial greedy"] != said["serial coupled"] != said["serial processed"]
    branches = [branch for reply in said["outcomes coupled"][1:] for branch in reply]
    assert len(branches) > 20 and all(len(branch[2]) == NUM_DRAFTS for branch in branches)
