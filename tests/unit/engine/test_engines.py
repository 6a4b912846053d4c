"""Real engines over tiny random checkpoints in float32: the theorem against the library's own output."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import Config, parse_config
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.target.engine import TargetEngine
from specray.errors import ConfigError
from specray.types import SamplingParams, Verdict, Verification, VerifyItem
from tests.pairwise import pairs
from tests.unit.engine.harness import (
    Drafter,
    Session,
    generate_overlapped,
    generate_serial,
    target_only,
    verify,
)
from tests.unit.engine.model.checkpoints import (
    VOCAB_SIZE,
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from tests.unit.engine.samplings import FANOUTS, assert_all_free
from tests.unit.engine.trees.drafters import (
    adversarial_drafter,
    dying_drafter,
    empty_drafter,
    engine_drafter,
    random_drafter,
    tree_drafter,
)
from tests.unit.engine.trees.random_trees import Shape, num_kept

PROMPT = [5, 17, 42, 8, 5, 60, 33]
NUM_OUTPUT = 16
GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))
PROCESSED = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((11, 3.0), (12, -100.0)),
    min_tokens=9,
    stop_token_ids=(1, 30, 31),
    seed=5,
    num_prompt_tokens=len(PROMPT),
)
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy-processed": replace(PROCESSED, temperature=0.0),
    "coupled": SamplingParams(seed=1234567890123456789, num_prompt_tokens=len(PROMPT)),
    "coupled-processed": PROCESSED,
}


def configuration(target: Path, draft: Path, *, forward: str = "auto", **draft_options: Any) -> Config:
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "profile_s": 0}
    common |= {"max_model_len": 64, "max_num_seqs": 4}
    return parse_config(
        {
            "target": {"model": str(target), "block_size": 16, "forward": forward, **common},
            "draft": {"model": str(draft), **common, **draft_options},
        }
    )


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", seed=1)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory: pytest.TempPathFactory, target_path: Path) -> Path:
    """The target with its weights a little off: right often, wrong often."""
    path = write_checkpoint(tmp_path_factory.mktemp("draft"), "llama", seed=1)
    model = reference_model(path)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(target_path: Path, draft_path: Path) -> TargetEngine:
    return build_target_engine(configuration(target_path, draft_path))


@pytest.fixture(scope="module")
def generic_target(target_path: Path, draft_path: Path) -> TargetEngine:
    """The library's own forward."""
    return build_target_engine(configuration(target_path, draft_path, forward="hf"))


@pytest.fixture(scope="module")
def drafts(target_path: Path, draft_path: Path) -> dict[str, DraftEngine]:
    """Block sizes differ: one block for a sequence as on CPU, and small ones."""
    return {
        "perfect": build_draft_engine(configuration(target_path, target_path)),
        "close": build_draft_engine(configuration(target_path, draft_path, block_size=4)),
    }


@pytest.fixture(scope="module")
def expected(target_path: Path) -> dict[str, list[int]]:
    """Output of the library's model, one full forward per token; for plain greedy its ``generate``."""
    model = reference_model(target_path)
    outputs = {
        name: target_only(
            lambda prefix: reference_logits(model, list(prefix))[-1], PROMPT, sampling, NUM_OUTPUT + 9
        )
        for name, sampling in SAMPLINGS.items()
    }
    assert outputs["greedy"] == reference_greedy(model, PROMPT, NUM_OUTPUT + 9)
    return outputs


def heads_of(target: TargetEngine, drafts: dict[str, DraftEngine]) -> list[TargetEngine | DraftEngine]:
    return [target, *drafts.values()]


def make_drafter(name: str, drafts: dict[str, DraftEngine], output: list[int]) -> Drafter:
    match name:
        case "perfect" | "close":
            return engine_drafter(drafts[name])
        case "dying":
            return dying_drafter(drafts["close"], rounds=2)
        case "random":
            return random_drafter(VOCAB_SIZE)
        case "tree":
            return tree_drafter(output, len(PROMPT), VOCAB_SIZE)
        case "adversarial":
            return adversarial_drafter(output, len(PROMPT), VOCAB_SIZE)
    return empty_drafter


@pairs(
    lambda name, sampling, num_drafts: name != "empty" or num_drafts == 0,
    name=("perfect", "close", "random", "tree", "adversarial", "empty", "dying"),
    sampling=tuple(SAMPLINGS),
    num_drafts=(0, 1, 2, 5, 8),
)
def test_output_is_the_models_own_with_any_draft(
    name: str,
    sampling: str,
    num_drafts: int,
    target: TargetEngine,
    drafts: dict[str, DraftEngine],
    expected: dict[str, list[int]],
) -> None:
    """Every number up to eight: tests/conformance. A drafter without draft tokens does not ask for one."""
    session = Session("a", list(PROMPT), SAMPLINGS[sampling])
    drafter = make_drafter(name, drafts, expected[sampling])
    assert (
        generate_serial(target, drafter, session, NUM_OUTPUT, num_drafts) == expected[sampling][:NUM_OUTPUT]
    )
    if name == "perfect":
        assert set(session.accepted) == {num_drafts}
    if name == "adversarial":
        assert set(session.accepted) == {0}
    for head in heads_of(target, drafts):
        assert_all_free(head)


@pairs(forward=("decoder", "hf"), sampling=tuple(SAMPLINGS), num_nodes=(1, 4, 9, 24))
def test_longest_right_path_of_a_tree_is_kept_and_stays_in_the_cache(
    forward: str,
    sampling: str,
    num_nodes: int,
    target: TargetEngine,
    generic_target: TargetEngine,
    expected: dict[str, list[int]],
) -> None:
    """Of random trees, wide and deep, over blocks of 16 tokens; all that follows reads what was moved."""
    engine, output = {"decoder": target, "hf": generic_target}[forward], expected[sampling]
    source = random.Random(num_nodes)
    session = Session("a", list(PROMPT), SAMPLINGS[sampling])
    while len(session.token_ids) < len(PROMPT) + NUM_OUTPUT:
        ahead = output[len(session.token_ids) - len(PROMPT) :]
        shape = Shape(
            tuple(source.randrange(max(-1, node - 6), node) for node in range(num_nodes)),
            tuple(source.choice((0, 0, 0, 1)) for _ in range(num_nodes)),
        )
        draft = shape.tree(ahead[:-1], VOCAB_SIZE)
        verdict = verify(engine, session, draft)
        assert verdict.num_accepted_tokens == num_kept(draft, ahead)
        engine.check_integrity()
    assert session.token_ids[len(PROMPT) :][:NUM_OUTPUT] == output[:NUM_OUTPUT]
    assert_all_free(engine)


@pairs(
    name=("perfect", "close"), sampling=tuple(SAMPLINGS), num_drafts=(1, 3, 8), fanout=("ahead", "enumerated")
)
def test_output_is_the_models_own_with_overlap(
    name: str,
    sampling: str,
    num_drafts: int,
    fanout: str,
    target: TargetEngine,
    drafts: dict[str, DraftEngine],
    expected: dict[str, list[int]],
) -> None:
    session = Session("a", list(PROMPT), SAMPLINGS[sampling])
    output = generate_overlapped(target, drafts[name], session, NUM_OUTPUT, num_drafts, FANOUTS[fanout])
    assert output == expected[sampling][:NUM_OUTPUT]
    if name == "perfect":
        assert all(session.hits)
    for head in heads_of(target, drafts):
        assert_all_free(head)


def test_repetition_penalty_is_that_of_generate(target_path: Path, target: TargetEngine) -> None:
    """A processor of the library itself, under speculation by a draft that is always wrong."""
    model = reference_model(target_path)
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=NUM_OUTPUT,
        min_new_tokens=NUM_OUTPUT,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=None,
        pad_token_id=1,
    )[0, len(PROMPT) :].tolist()
    session = Session("a", list(PROMPT), replace(GREEDY, repetition_penalty=1.5))
    assert generate_serial(target, random_drafter(VOCAB_SIZE), session, NUM_OUTPUT, 4) == output
    assert output != reference_greedy(model, PROMPT, NUM_OUTPUT)
    target.release(["a"])


def test_perfect_draft_under_rejection_is_always_accepted(
    target: TargetEngine, drafts: dict[str, DraftEngine]
) -> None:
    """At top-k 40 the draft's whole support travels, so both sides have the same distribution."""
    session = Session("a", list(PROMPT), replace(PROCESSED, verification=Verification.REJECTION))
    generate_serial(target, engine_drafter(drafts["perfect"]), session, NUM_OUTPUT, 3)
    assert set(session.accepted) == {3}
    for head in (target, drafts["perfect"]):
        assert_all_free(head)


def test_info_and_check(target: TargetEngine, drafts: dict[str, DraftEngine]) -> None:
    info = target.info
    assert (info.role, info.vocab_size, info.max_model_len, info.max_num_seqs) == (
        "target",
        VOCAB_SIZE,
        64,
        4,
    )
    assert (info.dtype, info.protocol_version, info.tensor_parallel_size) == ("float32", 2, 1)
    # Four sequences and the block of the health check; the draft's also have room for branches.
    assert (info.block_size, info.num_blocks) == (16, 5 * 4)
    assert (drafts["perfect"].info.block_size, drafts["perfect"].info.num_blocks) == (64, 4 * 2 + 1)
    assert drafts["perfect"].info.tokenizer_fingerprint == info.tokenizer_fingerprint
    for head in heads_of(target, drafts):
        head.check()


def test_every_sequence_fits_at_full_length(target: TargetEngine) -> None:
    """max_num_seqs sequences of max_model_len tokens at once, beside the block of the health check."""
    items = [
        VerifyItem(name, 1, 0, tuple(range(2, 66)), sample=True, sampling=GREEDY)
        for name in ("a", "b", "c", "d")
    ]
    assert all(isinstance(reply, Verdict) for reply in target.verify(items).replies)
    target.check()
    target.release(["a", "b", "c", "d"])


def test_cache_too_small_for_one_sequence_and_the_check(target_path: Path) -> None:
    with pytest.raises(ConfigError, match="health check"):
        build_draft_engine(configuration(target_path, target_path, cache_memory_gib=1.6e-5))
