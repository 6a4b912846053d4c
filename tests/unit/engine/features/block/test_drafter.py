"""Block drafters over rounds: what was accepted becomes context."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, TreeBudget
from specray.engine.features.block.drafter import BlockDrafter
from specray.engine.features.build import plan_drafter
from specray.engine.runner.memory import DrafterMemory
from specray.types import SamplingParams, Verdict, Verification
from tests.unit.engine.features.block.checkpoints import LAYOUTS, SIZE, dflash, dspark, speculators
from tests.unit.engine.features.block.reference import drafted
from tests.unit.engine.features.checkpoints import write
from tests.unit.engine.features.targets import (
    LONG,
    PROMPT,
    Session,
    make_target,
    step,
)
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, reference_model

BLOCK = LAYOUTS["windows"]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("block"), *BLOCK.files)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spark"), *dspark().files)


def fresh(llama: Path, token_ids: list[int], count: int = SIZE) -> tuple[int, ...]:
    return tuple(drafted(reference_model(llama), BLOCK, token_ids, count).tokens)


def test_long_prompts_are_caught_up_with_in_passes_of_bounded_size(
    llama: Path, windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, passes, run = make_target(llama, windowed), list[int](), BlockDrafter.catch_up

    def counted(drafter: BlockDrafter, store: Any, pieces: Any) -> None:
        passes.append(sum(each.end - each.first for each in pieces))
        run(drafter, store, pieces)

    monkeypatch.setattr("specray.engine.features.block.drafter.MAX_ROWS", 16)
    monkeypatch.setattr(BlockDrafter, "catch_up", counted)
    sessions = [Session("a", list(PROMPT)), Session("long", list(LONG)), Session("c", PROMPT[:1])]
    verdicts = step(target, sessions, [NO_DRAFT] * 3, SIZE)
    assert [each.draft.token_ids for each in verdicts] == [fresh(llama, each.token_ids) for each in sessions]
    assert passes == [16, 16, 16, 16, 16]


def test_the_head_reads_rows_of_several_depths_at_once_as_far_as_they_are_wanted(
    llama: Path, windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = make_target(llama, windowed), list[int]()
    drafting = target._drafting
    assert drafting is not None and isinstance(drafting._drafter, BlockDrafter)
    drafter, logits = drafting._drafter, drafting._drafter._logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    drafter._logits = counted
    sessions = [Session("a", list(PROMPT)), Session("b", PROMPT[:4])]
    step(target, sessions, [NO_DRAFT] * 2, 3)
    assert rows == [2 * 3]
    rows.clear()
    monkeypatch.setattr("specray.engine.features.block.drafter.HEAD_ROWS", 5)
    verdicts = step(target, sessions, [NO_DRAFT] * 2, 3)
    assert rows == [2 * 2, 2]
    assert [each.draft.token_ids for each in verdicts] == [
        fresh(llama, each.token_ids, 3) for each in sessions
    ]


@pytest.mark.parametrize(("max_num_seqs", "num_rows"), [(4, 128), (200, 200)])
def test_the_plan_of_memory_has_the_logits_of_those_rows(
    llama: Path, windowed: Path, tmp_path: Path, max_num_seqs: int, num_rows: int
) -> None:
    def plan(drafter: Path) -> DrafterMemory:
        settings = {"model": str(llama), "drafter": str(drafter), "max_num_seqs": max_num_seqs}
        found = plan_drafter(parse_config({"target": settings}).target)
        assert found is not None
        return found.drafter_memory

    assert plan(windowed).step_bytes == 4 * num_rows * VOCAB_SIZE
    some = speculators("vanilla")
    assert some.token_ids is not None and len(some.token_ids) < VOCAB_SIZE
    assert plan(write(tmp_path, *some.files)).step_bytes == 4 * num_rows * len(some.token_ids)


def test_a_block_may_reach_beyond_the_models_length(llama: Path, windowed: Path) -> None:
    target, session = make_target(llama, windowed, max_model_len=16), Session("a", list(range(5, 18)))
    [verdict] = step(target, [session], [NO_DRAFT], SIZE)
    assert verdict.draft.token_ids == fresh(llama, session.token_ids, 2)


def test_confidence_ends_chains_before_they_are_unlikely(llama: Path, spark: Path) -> None:
    target = make_target(llama, spark, max_num_seqs=12)
    model, block, lengths = reference_model(llama), dspark(), set()
    for size in (3, 5, 7, 9):
        for least in (0.02, 0.2, 0.6):
            session = Session(f"{size} {least}", PROMPT[:size])
            [verdict] = step(target, [session], [NO_DRAFT], SIZE, next_min_acceptance=least)
            wanted = drafted(model, block, session.token_ids, SIZE)
            together = list(accumulate(wanted.chances, mul))
            # The first one is always there; the others as long as all before them and they are likely.
            count = next((at for at in range(1, SIZE) if together[at] < least), SIZE)
            assert list(verdict.draft.token_ids) == wanted.tokens[:count], (size, least, together)
            lengths.add(count)
    assert len(lengths) >= 3


def test_under_rejection_confidence_ends_nothing(llama: Path, spark: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, verification=Verification.REJECTION)
    target, session = make_target(llama, spark), Session("a", list(PROMPT), sampling)
    [verdict] = step(target, [session], [NO_DRAFT], SIZE, next_min_acceptance=0.999999)
    assert len(verdict.draft) == SIZE == len(verdict.draft.probs)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_nodes_of_a_tree_know_the_token_before_them(llama: Path, tmp_path: Path, kind: str) -> None:
    block = dspark(kind, judges="no")
    target, session = make_target(llama, write(tmp_path, *block.files)), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], 3, next_tree=TreeBudget.of_widths((3, 1, 1)))
    draft, model, known = verdict.draft, reference_model(llama), session.token_ids
    paths = {tuple(draft.token_ids[node] for node in draft.path(leaf)) for leaf in range(len(draft))}
    firsts = drafted(model, block, known, 1).logits[0].topk(3).indices.tolist()
    wanted = {tuple(drafted(model, block, known, 3, path=(first,)).tokens) for first in firsts}
    assert len(wanted) == 3 and wanted <= paths


def test_a_block_that_sees_no_context_is_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockDrafter, "catch_up", lambda *args: None)
    block = dflash()
    target, session = make_target(llama, write(tmp_path, *block.files)), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], SIZE)
    assert isinstance(verdict, Verdict)
    wanted = drafted(reference_model(llama), block, session.token_ids, SIZE)
    assert list(verdict.draft.token_ids) != wanted.tokens
