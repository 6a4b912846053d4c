"""Proposals that run as one piece of captured work are those that are told step by step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specray.engine.drafting.engine import DraftEngine
from specray.engine.drafting.looped import JUDGED_TOKENS, LoopedProposals, known_tokens
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.runner import assembly
from specray.engine.runner.draft_loop import DraftLoop, LoopShape, loop_shapes
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.device.kernels import Kernels
from specray.types import DraftReply, Proposal, SamplingParams, SpeculateItem, Verification
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runner.tape import Tape
from tests.unit.engine.runners import cpu_runner, graphed, info_of

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(seed=3)
TOP_P = SamplingParams(seed=4, temperature=0.8, top_p=0.8, top_k=40, min_p=0.01)
REJECTION = SamplingParams(seed=5, verification=Verification.REJECTION)
PENALISED = SamplingParams(seed=6, repetition_penalty=1.3)
SAMPLINGS = {
    "greedy": (GREEDY,),
    "coupled": (COUPLED, replace(COUPLED, seed=(1 << 64) - 1)),
    "cut": (TOP_P, COUPLED, GREEDY),
    "rejection": (REJECTION, COUPLED, replace(REJECTION, top_p=0.7), GREEDY),
}
SHAPES = {
    "greedy": (1, False, False),
    "coupled": (2, False, False),
    "cut": (4, True, False),
    "rejection": (4, True, True),
}
"""Sequences, and whether tails are cut and distributions truncated, of these batches."""
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, ModelRunner]:
    """Two of one model; each has a cache of its own."""
    path = write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
    sizes = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 64}
    with pytest.MonkeyPatch.context() as patch:
        # A tape does not see kernels that are none of torch's.
        patch.setattr(assembly, "cpu_operators", lambda dtype, num_threads: TorchOperators(dtype))
        plain, other = (cpu_runner(path, role="draft", attention="gather", **sizes) for _ in range(2))
    return plain, graphed(other)[0]


def make_loop(runner: ModelRunner, tape: Tape, **changes: Any) -> DraftLoop:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "kernels": Kernels(),
        "capture": tape,
        "known": known_tokens(runner),
        "max_num_draft_probs": 8,
    }
    return DraftLoop(runner.forward, runner.cache, **{**values, **changes})


def make_engines(
    runners: tuple[ModelRunner, ModelRunner], tape: Tape, shapes: Sequence[LoopShape], *, budget: int = 64
) -> tuple[DraftEngine, DraftEngine]:
    """One that is told step by step, and one with a loop of some captured shapes."""
    engines = []
    for runner in runners:
        info = info_of(runner, "draft", max_model_len=64, max_num_batched_tokens=budget)
        looped = None
        if runner is runners[1]:
            loop = make_loop(runner, tape)
            loop.prepare(shapes, 600.0)
            assert loop.shapes == tuple(shapes)
            looped = LoopedProposals(runner, loop, max_num_batched_tokens=budget)
        engine = DraftEngine(runner, info, device=torch.device("cpu"), max_num_draft_probs=8, looped=looped)
        engines.append(engine)
    return engines[0], engines[1]


def all_of(
    num_sequences: int, num_tokens: int, *, cuts: bool = False, truncates: bool = False
) -> list[LoopShape]:
    """All shapes of one kind for proposals of so many tokens."""
    shapes = loop_shapes(num_sequences, num_tokens)
    return [
        shape for shape in shapes if (shape.num_sequences, *shape[2:]) == (num_sequences, cuts, truncates)
    ]


class Rounds:
    """Requests whose draft tokens are accepted at random, all in one batch.

    Args:
        max_model_len: where they end.
    """

    def __init__(self, samplings: Sequence[SamplingParams], seed: int) -> None:
        self._random = random.Random(seed)
        self._samplings = samplings
        lengths = [self._random.randint(1, 14) for _ in samplings]
        self.tokens = [[self._random.randrange(2, 90) for _ in range(length)] for length in lengths]
        self._told = [0] * len(samplings)
        self._round = 0

    def items(self, num_tokens: Sequence[int], min_acceptance: float = 0.0) -> list[SpeculateItem]:
        self._round += 1
        items = [
            SpeculateItem(
                f"r{index}",
                self._round,
                self._told[index],
                tuple(tokens[self._told[index] :]),
                num_tokens[index],
                sampling=sampling if self._told[index] == 0 else None,
                min_acceptance=min_acceptance,
            )
            for index, (tokens, sampling) in enumerate(zip(self.tokens, self._samplings, strict=True))
        ]
        self._told = [len(tokens) for tokens in self.tokens]
        return items

    def accept(self, replies: Sequence[DraftReply]) -> None:
        """Some of each proposal's tokens, often all, and one more."""
        for tokens, reply in zip(self.tokens, replies, strict=True):
            assert isinstance(reply, Proposal)
            drafted = reply.draft.token_ids
            count = len(drafted) if self._random.random() < 0.5 else self._random.randint(0, len(drafted))
            tokens += [*drafted[:count], self._random.randrange(2, 90)]


def assert_same(replies: Sequence[DraftReply], expected: Sequence[DraftReply]) -> None:
    for reply, other in zip(replies, expected, strict=True):
        assert isinstance(reply, Proposal) and isinstance(other, Proposal), (reply, other)
        assert reply.draft.token_ids == other.draft.token_ids
        for probs, others in zip(reply.draft.probs, other.draft.probs, strict=True):
            assert probs.token_ids == others.token_ids
            assert probs.probs == pytest.approx(others.probs, abs=1e-4)


def speculate_both(
    engines: tuple[DraftEngine, DraftEngine], items: Sequence[SpeculateItem]
) -> list[Proposal]:
    """The loop's proposals, which must be those of steps."""
    plain, looped = engines
    replies = looped.speculate(items).replies
    assert_same(replies, plain.speculate(items).replies)
    looped.check_integrity()
    return [reply for reply in replies if isinstance(reply, Proposal)]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("min_acceptance", [0.0, 0.3])
def test_rounds_of_a_loop_are_those_of_steps(
    runners: tuple[ModelRunner, ModelRunner], name: str, min_acceptance: float
) -> None:
    tape = Tape()
    count, cuts, truncates = SHAPES[name]
    engines = make_engines(runners, tape, all_of(count, 5, cuts=cuts, truncates=truncates))
    rounds = Rounds(SAMPLINGS[name], 1)
    sizes = itertools.cycle([4, 3, 5, 4, 1])
    num_drafted = 0
    for _ in range(6):
        replies = speculate_both(engines, rounds.items([next(sizes) for _ in rounds.tokens], min_acceptance))
        num_drafted += sum(len(reply.draft) for reply in replies)
        rounds.accept(replies)
    assert num_drafted > 6
    # Judged proposals of five tokens may take a second one.
    assert tape.num_replays == 6 if min_acceptance == 0.0 else 6 <= tape.num_replays <= 12


def test_a_proposal_longer_than_captured_work_takes_several(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    tape = Tape()
    shapes = [LoopShape(2, 8, cuts=True), LoopShape(1, 8), LoopShape(1, 3)]
    engines = make_engines(runners, tape, shapes)
    rounds = Rounds((COUPLED, TOP_P), 6)
    replies = speculate_both(engines, rounds.items([19, 3]))
    assert [len(reply.draft) for reply in replies] == [19, 3]
    # 8, 8 and 3 more: the other sequence has its tokens after the first.
    assert (tape.num_replays, tape.num_captures) == (3, 3)


@pytest.mark.parametrize("min_acceptance", [1e-6, 1e-3, 0.9])
def test_a_judged_proposal_is_drawn_in_parts_until_it_ends(
    runners: tuple[ModelRunner, ModelRunner], min_acceptance: float
) -> None:
    tape = Tape()
    engines = make_engines(runners, tape, [*all_of(2, JUDGED_TOKENS), *all_of(1, JUDGED_TOKENS)])
    rounds = Rounds((COUPLED, GREEDY), 5)
    for _ in range(3):
        before = tape.num_replays
        replies = speculate_both(engines, rounds.items([15, 10], min_acceptance))
        longest = max(len(reply.draft) for reply in replies)
        # A proposal shows its end by a token that it does not keep.
        assert tape.num_replays - before == -(-min(longest + 1, 15) // JUDGED_TOKENS)
        rounds.accept(replies)


def test_a_loop_ends_where_the_model_does(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """Sequences of one batch want as many tokens as there is room for: 5, 1 and none."""
    tape = Tape()
    engines = make_engines(runners, tape, [LoopShape(2, 5)])
    rounds = Rounds((COUPLED,) * 3, 2)
    rounds.tokens = [[5] * length for length in (40, 63, 64)]
    spare = runners[1].cache.layers[0][-BLOCK_SIZE:].zero_()
    replies = speculate_both(engines, rounds.items([5, 5, 5]))
    assert [len(reply.draft) for reply in replies] == [5, 1, 0]
    assert tape.num_replays == 1
    # What has no sequence goes to the spare block.
    assert spare.any()


@pytest.mark.parametrize(
    ("samplings", "num_replays"), [((PENALISED, COUPLED), 0), ((COUPLED, GREEDY), 2)], ids=["steps", "loop"]
)
def test_what_a_loop_cannot_draw_and_prompts_above_the_budget_go_step_by_step(
    runners: tuple[ModelRunner, ModelRunner], samplings: tuple[SamplingParams, ...], num_replays: int
) -> None:
    tape = Tape()
    engines = make_engines(runners, tape, [LoopShape(2, 3)], budget=7)
    rounds = Rounds(samplings, 4)
    rounds.tokens = [list(range(2, 32)), list(range(40, 48))]
    for _ in range(2):
        rounds.accept(speculate_both(engines, rounds.items([3, 3])))
    assert tape.num_replays == num_replays


@torch.inference_mode()
def test_only_the_spare_block_is_written_by_a_capture_and_by_nobody(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    runner = runners[1]
    before = [layer[:-BLOCK_SIZE].clone() for layer in runner.cache.layers]
    loop = make_loop(runner, Tape())
    loop.prepare([LoopShape(4, 3)], 600.0)
    loop.run(LoopShape(4, 3), (), (), ())
    for layer, kept in zip(runner.cache.layers, before, strict=True):
        assert torch.equal(layer[:-BLOCK_SIZE], kept)


@pytest.mark.parametrize("captured", [[], [LoopShape(1, 2), LoopShape(4, 3), LoopShape(4, 4, cuts=True)]])
def test_nothing_is_captured_while_a_request_waits(
    runners: tuple[ModelRunner, ModelRunner], captured: list[LoopShape]
) -> None:
    """What is missing goes in shorter pieces, beside sequences that are none, or step by step."""
    tape = Tape()
    engines = make_engines(runners, tape, captured)
    num_replays = []
    for samplings, sizes in (
        ((COUPLED,), [5]),  # in pieces of 2, 2 and 1
        ((COUPLED, GREEDY), [3, 2]),  # beside two that are none
        ((TOP_P, COUPLED), [2, 6]),  # 4, then what is left of the other: in one of 2 of its kind
        ((REJECTION,), [2]),
        ((COUPLED,) * 5, [3] * 5),
    ):
        before = tape.num_replays
        rounds = Rounds(samplings, 7)
        for _ in range(2):
            replies = speculate_both(engines, rounds.items(sizes))
            rounds.accept(replies)
        num_replays.append(tape.num_replays - before)
        for engine in engines:
            engine.release([f"r{index}" for index in range(len(samplings))])
    assert tape.num_captures == len(captured)
    assert num_replays == ([6, 2, 4, 0, 0] if captured else [0] * 5)
