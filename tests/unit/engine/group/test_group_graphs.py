"""Two ranks run captured forwards, are told of them through shared memory, and draw from what each has."""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from specray.draft_tokens import DraftTokens
from specray.engine.group.step_channel import NetworkChannel, RingChannel
from specray.engine.group.step_ring import StepRing
from specray.engine.inputs import SequenceInput
from specray.engine.model.layers.vocabulary import GatheredHead
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.cuda_graphs import Bucket, GraphedForward, run_again
from specray.engine.runner.runner import ModelRunner, shard_drawer
from specray.types import SamplingParams
from tests.unit.engine.group.group_ranks import DEADLINE_S, answers_of_ranks, join
from tests.unit.engine.group.test_parallel import PROMPT, lead_trees
from tests.unit.engine.harness import Session, target_only, verify_all
from tests.unit.engine.model.checkpoints import reference_logits, reference_model, write_checkpoint
from tests.unit.engine.runners import cpu_config, target_over


def captured(
    rank: int, meeting: Queue[str], path: str, silence_timeout_s: float, **options: bool
) -> tuple[ModelRunner, GraphedForward]:
    """A rank that runs through captured forwards."""
    group = join(rank, meeting, silence_timeout_s=silence_timeout_s, **options)
    config = cpu_config(path, max_num_seqs=2, forward="decoder", block_size=4, attention="gather")
    built = build_runner(config, role="target", parallel=group)
    forward, cache, info = built.forward, built.cache, built.info
    graphs = GraphedForward(forward, cache, max_model_len=info.max_model_len, capture=run_again)
    head = forward.head  # type: ignore[attr-defined]
    runner = ModelRunner(forward, cache, info, parallel=group, graphs=graphs, head=head)
    return runner, graphs


def serve_captured(rank: int, meeting: Queue[str], answers: Queue[Any], path: str) -> None:
    """Both ranks run through captured forwards, told of them through shared memory."""
    runner, graphs = captured(rank, meeting, path, 2, shares_memory=True)
    # Nothing goes over the network from here.
    NetworkChannel.send = NetworkChannel.receive = _fail  # type: ignore[method-assign,assignment]
    if rank > 0:
        runner.follow()
        answers.put((rank, graphs.buckets))
    else:
        logits = [runner.run([SequenceInput(PROMPT, 0, [7, 1, 3], len(PROMPT))]).logits.clone()]
        table = [5, 2, 8, 0]
        logits.append(runner.run([SequenceInput(PROMPT, 0, table, 1)]).logits.clone())
        # Longer than the silence that the follower allows.
        time.sleep(3)
        tokens = [*PROMPT, 41, 42, 43]
        inputs = [SequenceInput([41, 42, 43], 9, table, 3), SequenceInput([41], 9, [7, 1, 3], 1)]
        logits.append(runner.run(inputs).logits.clone())
        answers.put((rank, graphs.buckets, tokens, [each.tolist() for each in logits]))
    runner.close()


def test_a_follower_captures_and_replays_what_the_leader_does(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", vocab_size=97)
    received = sorted(answers_of_ranks(serve_captured, str(path), count=2), key=lambda answer: answer[0])
    (_, buckets, tokens, logits), (_, followed) = received
    assert buckets == followed == (Bucket(1, 12, False), Bucket(2, 3, False))
    model = reference_model(path)
    expected = reference_logits(model, tokens)
    others = reference_logits(model, [*PROMPT, 41])[-1:]
    for rows, right in zip(
        logits,
        (
            expected[: len(PROMPT)],
            expected[len(PROMPT) - 1 : len(PROMPT)],
            torch.cat((expected[-3:], others)),
        ),
        strict=True,
    ):
        torch.testing.assert_close(torch.tensor(rows), right, atol=2e-5, rtol=0)


def serve_elsewhere(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    """The follower does not reach the leader's memory, as if it were on another node."""
    if rank > 0:
        StepRing.attach = _fail  # type: ignore[method-assign]
    RingChannel.send = RingChannel.receive = _fail  # type: ignore[method-assign,assignment]
    group = join(rank, meeting, silence_timeout_s=DEADLINE_S, shares_memory=True)
    group.start({})
    if rank == 0:
        group.send_step([SequenceInput([5, 6], 3, [4, 0], 1)])
    else:
        received = group.receive_step()
        assert received is not None
        answers.put(received.work)
    if rank > 0:
        assert group.receive_step() is None
    group.close()


def _fail(*_: Any) -> None:
    raise FileNotFoundError("/dev/shm/specray-steps-elsewhere")


def test_a_group_over_several_nodes_is_told_over_the_network() -> None:
    before = set(Path("/dev/shm").glob("specray-steps-*"))
    assert answers_of_ranks(serve_elsewhere) == [[SequenceInput([5, 6], 3, [4, 0], 1)]]
    assert set(Path("/dev/shm").glob("specray-steps-*")) <= before


GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))
COUPLED = SamplingParams(seed=5, num_prompt_tokens=len(PROMPT))
CUT = replace(COUPLED, temperature=0.8, top_p=0.9)


def serve_draws(
    rank: int, meeting: Queue[str], answers: Queue[Any], path: str, outputs: list[list[int]]
) -> None:
    """The leader verifies trees and chains; both ranks draw."""
    runner, _ = captured(rank, meeting, path, 30, draws_apart=True)
    if rank > 0:
        runner.follow()
    else:
        drawn: list[int] = []
        run_draws = runner.run_draws
        runner.run_draws = lambda inputs, draws: drawn.append(len(draws.keys)) or run_draws(inputs, draws)  # type: ignore[method-assign,func-returns-value]
        tokens, _ = lead_trees(runner, outputs[1])
        num_drawn = len(drawn)
        answers.put((tokens, num_drawn, lead_chains(runner, outputs), drawn[num_drawn:]))
    runner.close()


def lead_chains(runner: ModelRunner, outputs: list[list[int]]) -> list[list[int]]:
    """Greedy and coupled requests in one batch, then one more whose tail is cut: that takes logits."""
    engine = target_over(runner)
    sessions = [Session(f"s{i}", list(PROMPT), each) for i, each in enumerate((GREEDY, COUPLED, CUT))]
    for count in (2, 2, 3, 3):
        drafts = []
        for session, output in zip(sessions[:count], outputs, strict=False):
            start = len(session.token_ids) - len(PROMPT)
            drafts.append(DraftTokens((output[start], output[start + 1], 1 + output[start + 2] % 2)))
        verdicts = verify_all(engine, sessions[:count], drafts)
        assert min(verdict.num_accepted_tokens for verdict in verdicts) >= 2
        engine.check_integrity()
    return [session.token_ids[len(PROMPT) :] for session in sessions]


def test_ranks_draw_what_one_process_draws(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", vocab_size=96)
    model = reference_model(path)
    outputs = [
        target_only(lambda prefix: reference_logits(model, list(prefix))[-1], PROMPT, sampling, 40)
        for sampling in (GREEDY, COUPLED, CUT)
    ]
    [(tokens, num_drawn, chains, drawn)] = answers_of_ranks(serve_draws, str(path), outputs)
    assert tokens == outputs[1][: len(tokens)] and num_drawn > 4
    for own, output in zip(chains, outputs, strict=True):
        assert len(own) >= 6 and own == output[: len(own)]
    # Four rows each: two steps of two requests. With a third one, whose tail is cut, the logits are joined.
    assert drawn == [8, 8]


def test_runs_of_tokens_that_split_a_block_of_noise_are_joined() -> None:
    class Group:
        draws_apart = True

        def __init__(self, rank: int, world_size: int) -> None:
            self.rank, self.world_size = rank, world_size

        def first_row(self, total: int) -> int:
            return self.rank * -(-total // self.world_size)

    def first_token_id(rank: int, world_size: int, num_logits: int, draws_apart: bool = True) -> int | None:
        group: Any = Group(rank, world_size)
        group.draws_apart = draws_apart
        head: Any = GatheredHead(None, num_logits, group)  # type: ignore[arg-type]
        drawer = shard_drawer(group, head, torch.device("cpu"))
        return None if drawer is None else drawer._first_token_id

    assert [first_token_id(rank, 2, 96) for rank in range(2)] == [0, 48]
    assert [first_token_id(rank, 3, 100) for rank in range(3)] == [None] * 3
    assert first_token_id(1, 2, 97) is None
    # The last of four would have none: 3 runs of 4 are all.
    assert [first_token_id(rank, 4, 12) for rank in range(4)] == [None] * 4
    assert [first_token_id(rank, 4, 13) for rank in range(4)] == [0, 4, 8, 12]
    assert first_token_id(0, 2, 96, draws_apart=False) is None
