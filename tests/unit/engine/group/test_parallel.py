"""Two ranks over gloo compute what one process computes, and neither waits for ever for the other."""

from __future__ import annotations

import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.group.parallel import (
    GroupArgs,
    GroupStore,
    ParallelContext,
    check_same_choices,
)
from specray.engine.inputs import Moves, SequenceInput
from specray.engine.model.description import ModelArgs, check_loadable
from specray.engine.runner.assembly import build_runner, group_choices
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError, EngineLostError
from specray.types import SamplingParams
from tests.unit.engine.group.group_ranks import (
    DEADLINE_S,
    answers_of_ranks,
    hang_or_die,
    join,
    running_ranks,
    start_differently,
)
from tests.unit.engine.harness import Session, target_only, verify
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
    write_family,
)
from tests.unit.engine.model.families.latent import LATENTS
from tests.unit.engine.model.families.mixtures import MIXTURES
from tests.unit.engine.model.zoo import GROUPED, SLIDING, Family
from tests.unit.engine.runners import cpu_config, cpu_runner, target_over
from tests.unit.engine.trees.drafters import tree_drafter

PROMPT = [5, 7, 9, 11, 13, 2, 4, 60, 33]
NUM_TOKENS = 12
NUM_TREE_TOKENS = 24
SAME_ON_ALL = "allowed: the same on all ranks; set what works on all of them"
LONG = [(7 * i) % 90 + 2 for i in range(120)]


@pytest.mark.parametrize(("num_tokens", "num_moves"), [(3, 0), (3, 2), (240, 9), (247, 1), (600, 64)])
def test_moves_survive_the_wire_behind_a_step(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_moves: int
) -> None:
    """In messages of one broadcast and of two."""
    sent: list[torch.Tensor] = []

    def broadcast(message: torch.Tensor, src: int, group: str) -> None:
        if group == "rank 0":
            sent.append(message)
        else:
            message.copy_(sent.pop(0))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    sides = [
        ParallelContext(GroupArgs(rank, 2, "cpu"), None, f"rank {rank}")  # type: ignore[arg-type]
        for rank in range(2)
    ]
    inputs = [SequenceInput(list(range(num_tokens)), 7, [4, 0], 2)]
    moves = Moves(list(range(100, 100 + num_moves)), list(range(num_moves)))
    sides[0].send_step(inputs, moves)
    assert [len(message) for message in sent][:1] == [256]
    assert sides[1].receive_step() == (inputs, moves, None)
    assert not sent


def build(
    rank: int, meeting: Queue[str], path: str, forward: str, *, silence_timeout_s: float = 30, **changes: Any
) -> ModelRunner:
    group = join(rank, meeting, silence_timeout_s=silence_timeout_s)
    config = cpu_config(path, max_num_seqs=2, forward=forward, **changes)
    return build_runner(config, role="target", parallel=group)


def serve_rank(rank: int, meeting: Queue[str], answers: Queue[Any], cases: list[tuple[str, str]]) -> None:
    """One group per case, one after the other in the same processes."""
    for path, forward in cases:
        # Kernels may be compiled in a step.
        runner = build(rank, meeting, path, forward, silence_timeout_s=60)
        if rank > 0:
            runner.follow()
        else:
            answers.put(lead(runner))
        runner.close()
        runner.close()


def lead(runner: ModelRunner) -> tuple[list[int], list[list[float]], list[list[float]]]:
    """Greedy tokens, the prompt's logits, and those of a batch that does not fit the first broadcast.

    The last rows of the batch belong to a prefix that was copied, on every rank, from another block.
    """
    prompt_logits = runner.run([SequenceInput(PROMPT, 0, [0], len(PROMPT))]).logits
    tokens = [*PROMPT, int(prompt_logits[-1].argmax())]
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        logits = runner.run([SequenceInput(tokens[-1:], len(tokens) - 1, [0], 1)]).logits
        tokens.append(int(logits[0].argmax()))
    batch = runner.run([SequenceInput(LONG, 0, [1], 1), SequenceInput(LONG, 0, [0], 1)]).logits
    runner.run([SequenceInput(PROMPT, 0, [0], 0)])
    runner.copy_tokens([1], [0], 60)
    runner.copy_tokens([1], [0], 100, first=60)
    copied = runner.run([SequenceInput(LONG[100:], 100, [0], 1)]).logits
    return tokens, prompt_logits.tolist(), [*batch.tolist(), *copied.tolist()]


# 97 tokens do not divide into two equal shards.
# qwen2 has one key head, which both ranks have.
CASES = [
    ("llama", "decoder", 96),
    ("llama-biased-scaled", "decoder", 97),
    ("qwen2", "decoder", 96),
    ("qwen3", "hf", 96),
    ("gemma3", "decoder", 97),
    ("phi3", "decoder", 96),
    ("qwen3_moe", "decoder", 96),
    ("gpt_oss", "decoder", 97),
    ("gemma2", "hf", 96),
    # All ranks have the whole latents, and each its own heads.
    ("deepseek_v3", "decoder", 96),
    ("deepseek_v3-halves", "decoder", 96),
]
ALONE = [
    *((name, "decoder", 96) for name in ("smollm3", "granite", "mixtral", *MIXTURES)),
    *((name, "decoder", 96) for name in LATENTS if not name.startswith("deepseek_v3")),
    *((name, "hf", 96) for name in ("afmoe", "cohere2_moe")),
]
"""Further families, whose tokens are compared only."""


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    known = [*CASES, *ALONE]
    paths = [write_checkpoint(tmp_path / name, name, vocab_size=size) for name, _, size in known]
    cases = [(str(path), forward) for path, (_, forward, _) in zip(paths, known, strict=True)]
    received = answers_of_ranks(serve_rank, cases, count=len(cases))
    for path, (tokens, logits, batch) in zip(paths, received, strict=True):
        model = reference_model(path)
        assert tokens[len(PROMPT) :] == reference_greedy(model, PROMPT, NUM_TOKENS)
        torch.testing.assert_close(torch.tensor(logits), reference_logits(model, PROMPT), atol=5e-5, rtol=0)
        expected = reference_logits(model, LONG)[-1:].expand(3, -1)
        torch.testing.assert_close(torch.tensor(batch), expected, atol=5e-5, rtol=0)


def start_late(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    """Rank 0 loads for longer than the silence that the other allows it later."""
    group = join(rank, meeting, silence_timeout_s=0.5)
    if rank == 0:
        time.sleep(2)
    answers.put((group.least(7 + rank), group.leaders(("said", 1) if rank == 0 else None)))


def test_a_rank_may_load_for_longer_than_it_may_be_silent_later() -> None:
    with running_ranks(start_late) as (_, answers):
        assert [answers.get(timeout=DEADLINE_S) for _ in range(2)] == [(7, ("said", 1))] * 2


def idle(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    """The leader has no step for longer than the silence that the other allows it."""
    group = join(rank, meeting, silence_timeout_s=3.0)
    group.start({})
    if rank == 0:
        time.sleep(4)
        group.send_step([SequenceInput([5], 0, [0], 1)])
    else:
        answers.put(group.receive_step())
    group.close()


def test_an_idle_leader_is_not_a_lost_one() -> None:
    assert answers_of_ranks(idle) == [([SequenceInput([5], 0, [0], 1)], Moves(), None)]


def verify_trees(
    rank: int, meeting: Queue[str], answers: Queue[Any], cases: list[tuple[str, str, list[int]]]
) -> None:
    """One group per case; the leader verifies trees with right and wrong nodes."""
    for path, forward, output in cases:
        runner = build(rank, meeting, path, forward, block_size=4)
        if rank > 0:
            runner.follow()
        else:
            answers.put(lead_trees(runner, output))
        runner.close()


def lead_trees(runner: ModelRunner, output: list[int]) -> tuple[list[int], list[int]]:
    engine = target_over(runner)
    sampling = SamplingParams(seed=5, num_prompt_tokens=len(PROMPT))
    for name in "ab":
        # The second finds in the prefix cache what the first has moved.
        session = Session(name, [*PROMPT, *output[: 9 * (name == "b")]], sampling)
        drafter = tree_drafter(output, len(PROMPT), runner.info.vocab_size)
        while len(session.token_ids) < len(PROMPT) + NUM_TREE_TOKENS:
            verify(engine, session, drafter(session, 9))
            engine.check_integrity()
        if name == "a":
            accepted = session.accepted
        engine.release([name])
        assert session.token_ids[len(PROMPT) :][:NUM_TREE_TOKENS] == output[:NUM_TREE_TOKENS]
    assert engine.info.num_prefix_cache_hits >= 16
    return session.token_ids[len(PROMPT) :][:NUM_TREE_TOKENS], accepted


def test_two_ranks_verify_trees_as_one(tmp_path: Path) -> None:
    """Each rank moves its own part of the K/V of what was kept."""
    sampling = SamplingParams(seed=5, num_prompt_tokens=len(PROMPT))
    cases = []
    for name, forward, size in CASES:
        path = write_checkpoint(tmp_path / name, name, vocab_size=size)
        model = reference_model(path)
        output = target_only(
            lambda prefix, model=model: reference_logits(model, list(prefix))[-1],
            PROMPT,
            sampling,
            NUM_TREE_TOKENS + 10,
        )
        cases.append((str(path), forward, output))
    received = answers_of_ranks(verify_trees, cases, count=len(cases))
    for (_, _, output), (tokens, accepted) in zip(cases, received, strict=True):
        assert tokens == output[:NUM_TREE_TOKENS]
        assert max(accepted) > 2


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize(("verb", "survivor"), [("die", 0), ("hang", 1)])
def test_a_lost_rank_is_noticed(verb: str, survivor: int, shares_memory: bool) -> None:
    with running_ranks(hang_or_die, verb, shares_memory) as (ranks, answers):
        message = answers.get(timeout=DEADLINE_S)
        ranks[survivor].join(DEADLINE_S)
        assert ranks[survivor].exitcode == 0
    assert message.startswith(f"rank {survivor}: rank {survivor} lost its group")


def test_no_rank_starts_where_one_has_blocks_of_another_size() -> None:
    """Its blocks would be other places of the cache than those that the leader means."""
    messages = sorted(answers_of_ranks(start_differently, count=2))
    expected = f"block_size is 256 on rank 0, 16 on rank 1; {SAME_ON_ALL}"
    assert messages == [(0, expected), (1, expected)]


def test_every_choice_in_which_ranks_differ_is_named() -> None:
    same = {"forward": "decoder", "attention": "varlen", "block_size": 256}
    check_same_choices([same, dict(same), dict(same)])
    with pytest.raises(ConfigError) as caught:
        check_same_choices([same, {**same, "attention": "triton", "block_size": 16}, same])
    assert str(caught.value) == (
        "attention is 'varlen' on ranks 0, 2, 'triton' on rank 1; block_size is 256 on ranks 0, 2, "
        f"16 on rank 1; {SAME_ON_ALL}"
    )


def test_what_ranks_choose_is_all_that_places_their_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    info = cpu_runner(path, attention="gather", block_size=4, max_num_seqs=2).info
    assert group_choices(info) == {
        "forward": "decoder",
        "attention": "gather",
        "block_size": 4,
        "num_blocks": 2 * info.max_model_len // 4,
        "num_snapshots": 0,
        "dtype": "float32",
        "checkpoint": info.checkpoint,
    }
    assert len(info.checkpoint) == 64


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    store = GroupStore("127.0.0.1", timeout_s=1)
    args = GroupArgs(0, 2, "cpu", start_timeout_s=1)
    with pytest.raises(EngineLostError, match="rank 0 of 2 found no group"):
        ParallelContext.join(args, store)


@pytest.mark.parametrize(
    ("size", "forward", "field"),
    [
        (3, "auto", "num_key_value_heads of 2 or be a multiple of it"),
        (8, "auto", "num_attention_heads of 4"),
        # Each rank of forward hf has key heads of its own.
        (4, "hf", "num_key_value_heads of 2"),
    ],
)
def test_size_that_does_not_divide_the_heads(llama: Path, size: int, forward: str, field: str) -> None:
    check_loadable(ModelArgs(str(llama), tensor_parallel_size=4))
    args = ModelArgs(str(llama), tensor_parallel_size=size, forward=forward)
    with pytest.raises(ConfigError, match=f"is {size}, which must divide the model's {field}$"):
        check_loadable(args)


def test_gemma_3n_is_served_by_one_rank(tmp_path: Path) -> None:
    family = Family(
        "gemma3n_text",
        {
            **GROUPED,
            **SLIDING,
            "head_dim": 8,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    )
    path = write_family(tmp_path, family)
    args = ModelArgs(str(path), tensor_parallel_size=2, role="target")
    with pytest.raises(
        ConfigError, match=r"target\.tensor_parallel_size is 2; model type 'gemma3n_text' allows only 1"
    ):
        check_loadable(args)


def test_architecture_that_cannot_be_sharded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "gpt2")
    args = ModelArgs(str(path), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; model type 'gpt2' allows only 1"):
        check_loadable(args)
