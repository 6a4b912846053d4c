"""Forwards that are recorded once and run again give what the forward itself gives, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.draft_tokens import DraftTokens
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.engine.visibility import branch_visibility
from specray.types import SamplingParams, Verdict
from tests.unit.engine.harness import Session, verify
from tests.unit.engine.model.checkpoints import write_checkpoint, write_family
from tests.unit.engine.model.zoo import GROUPED, Family
from tests.unit.engine.runners import cpu_runner, eager, target_over

pytest.importorskip("numba")

from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.linear import can_tile
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.decoder_amx import AmxDecoderForward
from specray.engine.runner.cpu_graphs import with_cpu_graphs

pytestmark = pytest.mark.skipif(
    not can_tile(torch.zeros(64, 32, dtype=torch.bfloat16)), reason="the instruction is missing"
)

PROMPT = list(range(40, 61))
OTHER = list(range(300, 309))
BLOCKS = (list(range(8)), [20, 9, 17, 11, 14, 12, 13, 10])


def make_runner(role: str = "draft", num_threads: int = 1) -> ModelRunner:
    config = EngineConfig(
        device="cpu", num_threads=num_threads, max_model_len=64, max_num_seqs=4, block_size=8
    )
    return build_runner(config, role=role)


@pytest.fixture(scope="module", params=[("draft", 1), ("target", 3)])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(*request.param)


def steps() -> list[list[SequenceInput]]:
    """Shapes that come back: at other places, in other blocks, with other neighbours."""
    first, second, third = list(range(8)), [20, 9, 17, 11, 14], [13, 12]
    single = [
        [SequenceInput([token], start, blocks, 1)]
        for blocks in (first, second)
        for start, token in ((21, 70), (22, 71), (23, 72), (24, 73))
    ]
    verify = [[SequenceInput([80, 81, 82], start, first, 3)] for start in (21, 24, 27)]
    catch_up = [[SequenceInput([90, 91, 92], start, second, 1)] for start in (21, 23)]
    both = [
        [SequenceInput([95 + index], 22 + index, first, 1), SequenceInput([96], 9 + index, third, 1)]
        for index in range(3)
    ]
    ragged = [[SequenceInput([60, 61], 21, first, 2), SequenceInput([62], 9, third, 1)]] * 2
    some = [[SequenceInput([60, 61], 21, first, 1), SequenceInput([62], 9, third, 0)]] * 2
    branches = [
        [
            SequenceInput(
                [5, 6, 7],
                0,
                first,
                3,
                (
                    branch_visibility(21, 21, 1 + step),
                    branch_visibility(4, 26, 1 + step),
                    branch_visibility(19, 31, 1 + step),
                ),
            )
        ]
        for step in range(3)
    ]
    return [*single, *verify, *catch_up, *both, *ragged, *some, *branches, *single]


def fill(runner: ModelRunner) -> None:
    for tokens, blocks in ((PROMPT, list(range(8))), (PROMPT, [20, 9, 17, 11, 14]), (OTHER, [13, 12])):
        runner.run([SequenceInput(tokens, 0, blocks, 1)])


def run_all(runner: ModelRunner, inputs: Sequence[Sequence[SequenceInput]]) -> list[torch.Tensor]:
    fill(runner)
    return [runner.run(step).logits for step in inputs]


def check_every_shape(runner: ModelRunner) -> None:
    expected = run_all(eager(runner), steps())
    # As they are, while they are captured, and from graphs.
    for _ in range(4):
        outputs = run_all(runner, steps())
        for output, other in zip(outputs, expected, strict=True):
            assert torch.equal(output, other)
    # Compared only now: no later run wrote into what an earlier one had given.
    assert len({tuple(output[0, :8].tolist()) for output in outputs}) > 10


def test_every_shape_gives_again_what_the_forward_gives(runner: ModelRunner) -> None:
    check_every_shape(runner)


def test_every_shape_of_gemma3(tmp_path: Path) -> None:
    """With norms that add, and tables of each layer's own."""
    sizes = {"vocab_size": 400, "head_dim": 64, "intermediate_size": 64, "max_position_embeddings": 64}
    path = write_checkpoint(tmp_path, "gemma3", **sizes)
    runner = cpu_runner(path, dtype="bfloat16", max_num_seqs=4, block_size=8)
    assert runner.cpu_graphs is not None
    check_every_shape(runner)


@pytest.mark.parametrize("changes", [{}, {"quantization": "int4"}])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_shape_of_experts(tmp_path: Path, changes: dict[str, str], num_threads: int) -> None:
    """Which experts a replay computes is what its own rows choose."""
    sizes = {"vocab_size": 400, "moe_intermediate_size": 64, "intermediate_size": 64}
    path = write_checkpoint(tmp_path, "qwen3_moe", **sizes)
    runner = cpu_runner(
        path, dtype="bfloat16", max_num_seqs=4, block_size=8, num_threads=num_threads, **changes
    )
    assert runner.cpu_graphs is not None
    check_every_shape(runner)
    assert runner.cpu_graphs.shapes


def test_every_shape_of_experts_beside_a_shared_mlp(tmp_path: Path) -> None:
    """With a gate of its own."""
    sizes = {
        "vocab_size": 400,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "num_experts_per_tok": 2,
    }
    shared = {"num_experts": 4, "shared_expert_intermediate_size": 32}
    path = write_family(tmp_path, Family("qwen2_moe", {**GROUPED, **sizes, **shared}))
    runner = cpu_runner(path, dtype="bfloat16", max_num_seqs=4, block_size=8)
    assert runner.cpu_graphs is not None
    check_every_shape(runner)


@pytest.mark.parametrize(("layers", "has_graphs"), [((), True), ((1,), False)])
def test_features_at_another_scale_are_not_captured(
    tmp_path: Path, layers: tuple[int, ...], has_graphs: bool
) -> None:
    path = write_checkpoint(tmp_path, "granite", intermediate_size=64, hidden_size=128)
    config = EngineConfig(model=str(path), device="cpu", num_threads=1, max_num_seqs=1)
    assert (build_runner(config, role="target", feature_layers=layers).cpu_graphs is not None) is has_graphs


def verdicts_on_trees(runner: ModelRunner, *, is_eager: bool) -> list[Verdict]:
    """Of rounds with trees of 9 nodes, told from what was kept before."""
    runner = eager(runner) if is_eager else runner
    engine = target_over(runner)
    session = Session("a", list(PROMPT), SamplingParams(temperature=0.0, num_logprobs=3))
    source, likely, verdicts = random.Random(2), [0], []
    for _ in range(8):
        parents = tuple(source.randrange(-1, node) for node in range(9))
        tokens = tuple(source.choice(likely) for _ in parents)
        verdicts.append(verify(engine, session, DraftTokens(tokens, parents)))
        likely = [token for entry in verdicts[-1].logprobs for token in entry.top_token_ids]
        likely += session.token_ids[-4:]
    return verdicts


def test_trees_run_from_graphs_as_they_run_without() -> None:
    runner = make_runner("target")
    expected = verdicts_on_trees(runner, is_eager=True)
    for _ in range(2):
        assert verdicts_on_trees(runner, is_eager=False) == expected
    assert runner.cpu_graphs is not None and runner.cpu_graphs.shapes


def test_a_step_that_would_go_on_from_the_last_one_waits_for_moves() -> None:
    runner = make_runner()
    fill(runner)
    for start in range(21, 25):
        runner.run([SequenceInput([70], start, list(range(8)), 1)])
    runner.move_tokens(list(range(8)), [30], 26)
    assert runner.advance([0], [71]) is None
    runner.run([SequenceInput([70], 25, list(range(8)), 1)])
    assert runner.advance([0], [71]) is not None


def test_repeated_shapes_run_from_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded the third time: recording a shape that never comes back would cost more than it brings."""
    runner = make_runner()
    fill(runner)
    calls = []
    for kind in (DecoderForward, AmxDecoderForward):
        monkeypatch.setattr(kind, "decode", lambda *args, run=kind.decode: calls.append(1) or run(*args))
    for start in range(21, 29):
        runner.run([SequenceInput([70], start, list(range(8)), 1)])
        runner.run([SequenceInput([80, 81, 82], start, list(range(8)), 3)])
    assert len(calls) == 6


def test_a_failed_recording_leaves_nothing_behind() -> None:
    runner = make_runner()
    fill(runner)
    expected = eager(runner).run([SequenceInput([70], 21, list(range(8)), 1)]).logits
    with pytest.raises((IndexError, AssertionError)):
        runner.run([SequenceInput([70], 21, [], 1)])
    assert runner.forward.attention.thread_pool.recorder is None
    for _ in range(2):
        assert torch.equal(runner.run([SequenceInput([70], 21, list(range(8)), 1)]).logits, expected)


def test_a_forward_of_other_operators_is_not_recorded() -> None:
    config = EngineConfig(device="cpu", attention="gather", num_threads=1, max_model_len=64, max_num_seqs=1)
    forward = build_runner(config, role="draft").forward
    assert with_cpu_graphs(forward) is None


def test_graphs_share_the_room_of_their_tensors() -> None:
    runner = make_runner()
    assert runner.cpu_graphs is not None
    sizes = []
    for num_rows in range(8, 0, -1):
        runner.run([SequenceInput([60] * num_rows, 0, list(range(8)), num_rows)])
        sizes.append(runner.cpu_graphs.num_bytes)
    assert len(set(sizes)) == 1


def test_torch_has_few_threads_beside_those_of_kernels() -> None:
    before = torch.get_num_threads()
    try:
        assert make_runner("target", 3).cpu_graphs is not None
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not tiles.is_usable(), reason="rows cost one by one")
def test_numbers_of_rows_that_cost_the_same_share_a_recording() -> None:
    runner = make_runner("target")
    assert runner.cpu_graphs is not None
    plain = eager(runner)

    def rows_of(counts: Sequence[tuple[int, int]]) -> list[SequenceInput]:
        return [
            SequenceInput([(37 * index + 5 * row) % 900 for row in range(count)], 0, blocks, wanted)
            for index, (blocks, (count, wanted)) in enumerate(zip(BLOCKS, counts, strict=False))
        ]

    # 33 to 48 rows, all with logits; then the last ones of one sequence, beyond a block's height and below.
    groups = [
        [rows_of([(20, 20), (count - 20, count - 20)]) for count in (48, 33, 41, 47, 33)],
        [rows_of([(60, wanted)]) for wanted in (40, 44, 36, 33, 20, 14)],
        [rows_of([(count, 1)]) for count in (49, 64, 50)],
    ]
    for group in groups:
        for step in group:
            expected = plain.run(step).logits
            for _ in range(3):
                assert torch.equal(runner.run(step).logits, expected)
    assert runner.cpu_graphs.shapes == [(48, 48), (64, 8), (64, 16), (64, 24), (64, 48)]


def continued(
    runner: ModelRunner, starts: Sequence[int], kept: Sequence[Sequence[int]]
) -> list[tuple[torch.Tensor, list[SequenceInput]]]:
    """Steps of one token of each of some sequences, each step of some of those before: logits and inputs."""
    inputs = [SequenceInput([70 + index], start, BLOCKS[index], 1) for index, start in enumerate(starts)]
    for count in sorted({*map(len, kept), len(starts)}):
        for _ in range(4):  # recorded the third time; only a recording's run goes on
            runner.run(inputs[:count])
    done = []
    for step, indexes in enumerate(kept):
        tokens = [80 + 10 * step + index for index in range(len(indexes))]
        inputs = [
            SequenceInput([token], inputs[index].start + 1, inputs[index].block_ids, 1)
            for token, index in zip(tokens, indexes, strict=True)
        ]
        output = runner.advance(indexes, tokens)
        assert output is not None, step
        done.append((output.logits.clone(), inputs))
    return done


@pytest.mark.parametrize("sequence", [list, tuple])
@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ((21,), [[0], [0], [0], [0]]),  # across a block's end, where the next block follows
        ((21, 19), [[0, 1], [0, 1], [0, 1]]),
        ((21, 11), [[0, 1], [1], [0]]),
        ((21, 11), [[0, 1], [0], [0]]),
    ],
)
def test_a_step_that_goes_on_gives_what_a_planned_one_gives(
    runner: ModelRunner,
    starts: tuple[int, ...],
    kept: list[list[int]],
    sequence: Callable[[list[int]], Sequence[int]],
) -> None:
    fill(runner)
    done = continued(runner, starts, [sequence(indexes) for indexes in kept])
    plain = eager(runner)
    fill(plain)
    plain.run([SequenceInput([70 + index], start, BLOCKS[index], 1) for index, start in enumerate(starts)])
    for logits, inputs in done:
        assert torch.equal(logits, plain.run(inputs).logits)


def test_what_cannot_go_on_is_planned_anew(runner: ModelRunner) -> None:
    fill(runner)
    one = [SequenceInput([70], 21, BLOCKS[0], 1)]
    for _ in range(4):
        runner.run(one)
    assert runner.advance([0], [71]) is not None
    # After a step that was given, several rows of a sequence, or none at all.
    runner.run([SequenceInput([70, 71], 21, BLOCKS[0], 2)])
    assert runner.advance([0], [72]) is None
    runner.run(one)
    assert runner.advance([0], [71]) is not None
    runner.run([SequenceInput([70], 15, BLOCKS[1], 1)])
    # The next token's block does not follow: BLOCKS[1] goes from 9 to 17.
    assert runner.advance([0], [71]) is None
    assert runner.advance([0], [71]) is None
    assert eager(runner).advance([0], [71]) is None
    for _ in range(4):
        runner.run([SequenceInput([70], 21, BLOCKS[0], 1), SequenceInput([70], 14, BLOCKS[1], 1)])
    # Of the second of two, which stays alone.
    assert runner.advance([1], [71]) is not None
    assert runner.advance([0], [72]) is None
    branch = [SequenceInput([5], 0, BLOCKS[0], 1, (branch_visibility(21, 21, 1),))]
    for _ in range(4):
        runner.run(branch)
    assert runner.advance([0], [71]) is None


def test_a_step_goes_on_as_long_as_there_is_room(runner: ModelRunner) -> None:
    from specray.engine.cpu.attention import kernel as attention

    fill(runner)
    one = [SequenceInput([70], 21, BLOCKS[0], 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FURTHER_STEPS", 2)
        for _ in range(4):
            runner.run(one)
        assert [runner.advance([0], [71]) is not None for _ in range(3)] == [True, True, False]
