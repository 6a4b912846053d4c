"""A target with recurrent layers gives what it says alone, whatever is drafted, refused, cut or lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import Config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.cache.state_pool import StatePool
from specray.engine.cache.state_slots import MAX_OPEN_ROWS
from specray.engine.preflight import check_models
from specray.engine.runner.runner import ModelRunner
from specray.engine.target.engine import TargetEngine
from specray.errors import ConfigError
from specray.types import LookaheadBudget, SamplingParams, TargetReplies, Verdict, VerifyItem
from tests.unit.engine.harness import (
    Session,
    commit,
    generate_overlapped,
    target_only,
    verify,
    verify_all,
    verify_item,
)
from tests.unit.engine.model.checkpoints import (
    VOCAB_SIZE,
    reference_logits,
    reference_model,
    write_checkpoint,
    write_family,
)
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner, target_over
from tests.unit.engine.trees.drafters import tree_drafter

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=5)
LONG = [(11 * i * i + 3 * i) % 90 + 2 for i in range(45)]
SHORT = [5, 7, 9, 11, 13]
NUM_TOKENS = 16
K = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("qwen3_5"), FAMILIES["qwen3_5"])


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return cpu_runner(checkpoint, max_model_len=96, max_num_seqs=4, block_size=16)


class Expected:
    """What the library's model says, computed once for each prompt."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = reference_model(checkpoint)
        self._known: dict[Any, list[int]] = {}

    def of(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        key = tuple(prompt), sampling.seed
        if key not in self._known:
            self._known[key] = target_only(self._logits, prompt, sampling, NUM_TOKENS + K + 2)
        return self._known[key]

    def _logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return reference_logits(self._model, list(prefix))[-1]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Expected:
    return Expected(checkpoint)


def make_engine(runner: ModelRunner, *, max_num_batched_tokens: int = 64) -> TargetEngine:
    """Over states that hold NaN where no sequence has written."""
    assert isinstance(runner.states, StatePool)
    for layer in runner.states.layers:
        layer.fill(float("nan"))
    return target_over(runner, max_num_seqs=3, max_num_batched_tokens=max_num_batched_tokens)


def new_session(name: str, prompt: Sequence[int], sampling: SamplingParams) -> Session:
    return Session(name, list(prompt), replace(sampling, num_prompt_tokens=len(prompt)))


def drafted(output: Sequence[int], session: Session, num_prompt: int, num_right: int) -> DraftTokens:
    """Draft tokens of which the first so many are what the target will say."""
    start = len(session.token_ids) - num_prompt
    tokens = output[start : start + K]
    return DraftTokens(tuple((token + (i >= num_right)) % VOCAB_SIZE for i, token in enumerate(tokens)))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 7])
def test_two_sequences_with_drafts_right_and_wrong(
    sampling: SamplingParams, max_num_batched_tokens: int, runner: ModelRunner, expected: Expected
) -> None:
    """A step of at most 7 tokens cuts prompts, and rounds behind the first of their rows."""
    engine = make_engine(runner, max_num_batched_tokens=max_num_batched_tokens)
    pair = [(new_session("a", LONG, sampling), LONG), (new_session("b", SHORT, sampling), SHORT)]
    for round_id in range(NUM_TOKENS):
        drafts = [
            drafted(expected.of(prompt, sampling), session, len(prompt), (3 * round_id + index) % (K + 1))
            for index, (session, prompt) in enumerate(pair)
        ]
        verify_all(engine, [session for session, _ in pair], drafts)
        engine.check_integrity()
        for session, prompt in pair:
            found = session.token_ids[len(prompt) :]
            assert found == expected.of(prompt, sampling)[: len(found)]
        if all(len(session.token_ids) >= len(prompt) + NUM_TOKENS for session, prompt in pair):
            break
    assert {count for session, _ in pair for count in session.accepted} >= {0, 1, 2, 3, 4}
    engine.release(["a", "b"])
    assert engine.info.num_blocks_in_use == 0
    assert runner.states is not None and runner.states.num_used == 1


def test_a_prompt_in_chunks_beside_a_running_sequence(runner: ModelRunner, expected: Expected) -> None:
    engine = make_engine(runner)
    running, other = new_session("b", SHORT, GREEDY), new_session("a", LONG, GREEDY)
    verify(engine, running, NO_DRAFT)
    for start in range(0, 40, 20):
        chunk = VerifyItem(
            "a",
            1,
            start,
            tuple(LONG[start : start + 20]),
            NO_DRAFT,
            sample=False,
            sampling=other.sampling if start == 0 else None,
        )
        _, reply = engine.verify([chunk, verify_item(running, NO_DRAFT)]).replies
        assert isinstance(reply, Verdict)
        commit(running, NO_DRAFT, reply)
    other.target_len = 40
    verify(engine, other, NO_DRAFT)
    assert other.token_ids[len(LONG) :] == expected.of(LONG, GREEDY)[:1]
    assert running.token_ids[len(SHORT) :] == expected.of(SHORT, GREEDY)[:3]


@pytest.mark.parametrize("budget", [64, 7])
def test_a_scored_prompt_in_chunks_is_computed_once_but_for_a_row_of_each(
    budget: int, checkpoint: Path, runner: ModelRunner
) -> None:
    engine = make_engine(runner, max_num_batched_tokens=budget)
    sampling = replace(GREEDY, num_prompt_tokens=len(LONG), num_prompt_logprobs=1)
    num_rows, scores = [], []
    for start in range(0, len(LONG), 8):
        tokens, is_last = tuple(LONG[start : start + 8]), start + 8 >= len(LONG)
        item = VerifyItem(
            "a", start, start, tokens, NO_DRAFT, sample=is_last, sampling=sampling if start == 0 else None
        )
        replies = engine.verify([item])
        num_rows.append(replies.num_rows)
        [reply] = replies.replies
        assert isinstance(reply, Verdict)
        scores += reply.prompt_logprobs
    assert num_rows == [8, 9, 9, 9, 9, 6]
    assert [score.token_id for score in scores] == LONG[1:]
    logprobs = reference_logits(reference_model(checkpoint), LONG).double().log_softmax(-1)
    expected = [float(logprobs[place, token]) for place, token in enumerate(LONG[1:])]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)
    engine.release(["a"])


def test_no_accepted_row_is_computed_again(runner: ModelRunner, expected: Expected) -> None:
    engine, session = make_engine(runner), new_session("a", SHORT, GREEDY)
    output, num_rows = expected.of(SHORT, GREEDY), []
    for num_right in (0, 2, 4, 3, 0):
        draft = drafted(output, session, len(SHORT), num_right)
        replies = engine.verify([verify_item(session, draft)])
        [reply] = replies.replies
        assert isinstance(reply, Verdict) and reply.num_accepted_tokens == num_right
        commit(session, draft, reply)
        num_rows.append(replies.num_rows)
    assert num_rows == [5 + K, *[1 + K] * 4]


def test_an_item_sent_again_gets_the_same_answer(runner: ModelRunner, expected: Expected) -> None:
    engine, session = make_engine(runner), new_session("a", LONG, GREEDY)
    verify(engine, session, NO_DRAFT)
    item = verify_item(session, drafted(expected.of(LONG, GREEDY), session, len(LONG), 2))
    first, second = engine.verify([item]), engine.verify([item])
    assert first.replies == second.replies
    assert second.num_rows == 1 + K


def test_a_lost_engine_is_resumed_from_the_tokens(runner: ModelRunner, expected: Expected) -> None:
    session = new_session("a", LONG, SEEDED)
    output = expected.of(LONG, SEEDED)
    engine = make_engine(runner)
    for num_right in (2, 0):
        verify(engine, session, drafted(output, session, len(LONG), num_right))
    engine = make_engine(runner)
    session.target_len = 0
    for num_right in (1, 4, 0):
        verify(engine, session, drafted(output, session, len(LONG), num_right))
    found = session.token_ids[len(LONG) :]
    assert len(found) == 12 and found == output[:12]


def test_of_a_tree_the_first_chain_is_verified(runner: ModelRunner, expected: Expected) -> None:
    engine, session = make_engine(runner), new_session("a", SHORT, GREEDY)
    output = expected.of(SHORT, GREEDY)
    drafter = tree_drafter(output, len(SHORT), VOCAB_SIZE)
    depths = []
    while len(session.token_ids) < len(SHORT) + NUM_TOKENS // 2:
        tree = drafter(session, 6)
        verify(engine, session, tree)
        depths.append(len(tree.first_path))
        assert session.accepted[-1] <= depths[-1]
    found = session.token_ids[len(SHORT) :]
    assert found == output[: len(found)] and max(session.accepted) >= 1


def test_windows_of_lookahead_decoding_are_left_out(runner: ModelRunner, expected: Expected) -> None:
    engine, session = make_engine(runner), new_session("a", SHORT, GREEDY)
    replies: list[TargetReplies] = []
    for _ in range(4):
        item = replace(verify_item(session, NO_DRAFT), lookahead=LookaheadBudget())
        replies.append(engine.verify([item]))
        [reply] = replies[-1].replies
        assert isinstance(reply, Verdict)
        commit(session, NO_DRAFT, reply)
    assert [each.num_rows for each in replies] == [5, 1, 1, 1]
    assert session.token_ids[len(SHORT) :] == expected.of(SHORT, GREEDY)[:4]


def settings(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    engine = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "num_threads": 1, "profile_s": 0}
    target = {"model": str(checkpoint), "max_num_seqs": 2, **engine, **changes.pop("target", {})}
    draft = {"model": "ngram"} | changes.pop("draft", {})
    if draft["model"] not in ("ngram", "lookahead"):
        draft = {"max_num_seqs": 2, **engine, **draft}
    return {"target": target, "draft": draft, **changes}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_overlap_with_a_draft_of_attention_alone(
    sampling: SamplingParams, checkpoint: Path, expected: Expected, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3")
    config = Config.model_validate(settings(checkpoint, draft={"model": str(tmp_path)}))
    target, draft = build_target_engine(config), build_draft_engine(config)
    session = new_session("a", LONG, sampling)
    output = generate_overlapped(target, draft, session, NUM_TOKENS, 3, lambda count: (2,) * (count + 1))
    assert output == expected.of(LONG, sampling)[:NUM_TOKENS]


def test_without_room_for_a_snapshot_prefixes_are_not_used_again(
    checkpoint: Path, expected: Expected
) -> None:
    changes = {"target": {"snapshot_memory_gib": 0}}
    engine = build_target_engine(Config.model_validate(settings(checkpoint, **changes)))
    for name in ("a", "b"):
        session = new_session(name, LONG, GREEDY)
        verify(engine, session, NO_DRAFT)
        assert session.token_ids[len(LONG) :] == expected.of(LONG, GREEDY)[:1]
    assert engine.info.num_prefix_cache_queries == engine.info.num_snapshots == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculation": {"tree": "auto"}},
            "speculation.tree is 'auto' and target.model '{path}' has recurrent layers, which verify chains "
            "alone; allowed: 'off'",
        ),
        (
            {"draft": {"model": "lookahead"}},
            "draft.model is 'lookahead' and target.model '{path}' has recurrent layers, which verify chains "
            "alone; allowed: a model, 'ngram' or 'suffix'",
        ),
        (
            {"target": {"tensor_parallel_size": 4}},
            "target.tensor_parallel_size is 4, which must divide the model's linear_num_key_heads of 2",
        ),
    ],
)
def test_what_is_no_chain_or_cannot_be_shared_is_refused_before_weights_load(
    changes: dict[str, Any], message: str, checkpoint: Path
) -> None:
    config = Config.model_validate(settings(checkpoint, **changes))
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    assert str(caught.value) == message.format(path=checkpoint)


def test_forward_hf_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = Config.model_validate(settings(checkpoint, target={"forward": "hf"}))
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    assert str(caught.value) == (
        f"model {str(checkpoint)!r}: model type 'qwen3_5_text' is not supported: it has recurrent layers, "
        "which the decoder alone runs; allowed: forward auto or decoder"
    )
    family = FAMILIES["qwen3_5"]
    write_family(tmp_path, replace(family, values={**family.values, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=r"auto or decoder with other values than the configuration's$"):
        check_models(Config.model_validate(settings(tmp_path)))


def test_trees_are_refused_by_an_engine_that_starts_alone(checkpoint: Path) -> None:
    config = Config.model_validate(settings(checkpoint, speculation={"tree": "8"}))
    with pytest.raises(ConfigError, match="which verify chains alone; allowed: 'off'"):
        build_target_engine(config)


def test_states_count_as_memory_of_the_cache(checkpoint: Path, runner: ModelRunner) -> None:
    """A little less than 200 sequences and one more take, then a little more: no room for a prompt."""
    taken = 201 * sum(shape.num_bytes(MAX_OPEN_ROWS, 4) for shape in runner.forward.cache_shape.states)

    def refusal(num_bytes: int) -> str:
        target = {"cache_memory_gib": num_bytes / 2**30, "max_num_seqs": 200}
        with pytest.raises(ConfigError) as caught:
            build_target_engine(Config.model_validate(settings(checkpoint, target=target)))
        return str(caught.value)

    gib = f"take {taken / 2**30:.3f} GiB"
    assert gib == "take 0.001 GiB"
    assert f"; the states of recurrent layers of 200 sequences and one more {gib}; allowed" in refusal(
        taken - 99
    )
    assert f", of which the states of recurrent layers {gib}; one sequence of max_model_len 96 needs " in (
        refusal(taken + 99)
    )


def test_longer_drafts_are_verified_as_far_as_there_are_records(
    runner: ModelRunner, expected: Expected
) -> None:
    engine, session = make_engine(runner), new_session("a", SHORT, GREEDY)
    output = tuple(expected.of(SHORT, GREEDY))
    verify(engine, session, DraftTokens(output[:12]))
    verify(engine, session, DraftTokens(output[8:20]))
    assert session.accepted == [MAX_OPEN_ROWS - 1] * 2
    assert session.token_ids[len(SHORT) :] == list(output[:16])


def test_a_slot_that_is_used_again_holds_nothing_of_the_sequence_before(
    runner: ModelRunner, expected: Expected
) -> None:
    """A shorter prompt than the convolution has taps takes the slot of one that was released in a verify."""
    engine = make_engine(runner)
    first = new_session("a", LONG, GREEDY)
    verify(engine, first, drafted(expected.of(LONG, GREEDY), first, len(LONG), 2))
    engine.release(["a"])
    for prompt in ([7], SHORT):
        session = new_session("b", prompt, GREEDY)
        for _ in range(3):
            verify(engine, session, NO_DRAFT)
        assert session.token_ids[len(prompt) :] == expected.of(prompt, GREEDY)[:3]
        engine.release(["b"])
