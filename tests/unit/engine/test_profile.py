"""What engines measure of themselves at their start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.engine.profile import TargetWorkload, profile_draft, profile_target
from specray.engine_info import EngineInfo, RoutedExperts, StepTime
from specray.types import DraftReplies, ItemFailed, SpeculateItem, TargetReplies, VerifyItem
from tests.unit.engine.harness import engine_info, toy_draft, toy_target


def times(*pairs: tuple[int, float]) -> tuple[StepTime, ...]:
    return tuple(StepTime(num_rows, seconds) for num_rows, seconds in pairs)


class TimedEngine:
    """Both engines, on a clock of their own: a step takes ``first_s`` the first time, then ``step_s``."""

    def __init__(self, info: EngineInfo, *, step_s: float, first_s: float) -> None:
        self.info = info
        self.now_s = 0.0
        self.widths: list[int] = []
        self.fails = False
        self.disturbed: dict[int, float] = {}
        """Seconds of single steps, by their number."""
        self._step_s = step_s
        self._first_s = first_s

    def clock(self) -> float:
        return self.now_s

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        rows = sum(len(item.token_ids) + len(item.draft.token_ids) for item in items)
        if items[0].sample:
            assert all(item.base_len == items[0].base_len for item in items)
        return TargetReplies(self._failures(items), self._pass(rows if items[0].sample else 0))

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        num_tokens = items[0].num_speculative_tokens
        return DraftReplies(self._failures(items), self._pass(len(items) if num_tokens else 0))

    def release(self, request_ids: Sequence[str]) -> None: ...

    def check(self) -> None: ...

    def _failures(self, items: Sequence[VerifyItem | SpeculateItem]) -> tuple[ItemFailed, ...]:
        failed = ItemFailed(items[0].request_id, 0, 0, "no room", True)
        return (failed,) if self.fails else ()

    def _pass(self, width: int) -> int:
        if not width:
            return 0
        usual = self._step_s if width in self.widths else self._first_s
        seconds = self.disturbed.get(len(self.widths), usual)
        self.widths.append(width)
        self.now_s += seconds
        return round(seconds * 1e9)


SEQUENCE_S = 2e-5


class ReadingEngine(TimedEngine):
    """A target of 0.1 ms a row, 20 us a sequence, and so many seconds for each token before the rows."""

    def __init__(self, info: EngineInfo, token_s: float) -> None:
        super().__init__(info, step_s=0.0, first_s=0.0)
        self.token_s = token_s
        self.shapes: list[tuple[int, int, int]] = []
        """Rows, sequences and tokens before the rows of each step."""

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        rows = sum(len(item.token_ids) + len(item.draft.token_ids) for item in items)
        if items[0].sample:
            context = sum(item.base_len for item in items)
            own = 0.0001 * rows + SEQUENCE_S * len(items) + self.token_s * context
            self.disturbed = self.disturbed | {
                len(self.widths): own + self.disturbed.get(len(self.widths), 0)
            }
            self.shapes.append((rows, len(items), context))
        return super().verify(items)


INFO = replace(
    engine_info("target", max_model_len=1024, block_size=1024, num_blocks=65, max_num_seqs=64),
    max_num_batched_tokens=128,
)


def test_every_width_is_measured_and_its_first_step_does_not_count() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.010)
    measured = profile_target(engine, budget_s=0.5, clock=engine.clock).step_times
    assert measured == times(*((rows, 0.001) for rows in (1, 2, 4, 8, 16, 32, 36, 64, 128)))
    draft = TimedEngine(replace(INFO, role="draft"), step_s=0.001, first_s=0.010)
    # Four tokens a step.
    assert profile_draft(draft, budget_s=0.5, clock=draft.clock) == times(
        *((rows, 0.00025) for rows in (1, 2, 4, 8, 16, 32))
    )


def test_no_step_is_begun_that_would_end_after_the_budget() -> None:
    engine = TimedEngine(INFO, step_s=0.030, first_s=0.030)
    assert profile_target(engine, budget_s=0.1, clock=engine.clock).step_times == times((1, 0.030))
    assert engine.widths == [1, 1, 2]
    assert engine.now_s == pytest.approx(0.090)


def test_a_disturbed_step_is_measured_again_and_takes_no_longer_than_a_wider_one() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.disturbed = {0: 0.020, 1: 0.030, 2: 0.025, 3: 0.025}
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times[:2] == times(
        (1, 0.001), (2, 0.001)
    )
    # No time for another pass: 4 rows in 1 ms are the bound for 1 and 2.
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.disturbed = {0: 0.020, 1: 0.030, 2: 0.025, 3: 0.025}
    measured = profile_target(engine, budget_s=0.126, clock=engine.clock).step_times
    assert measured[:3] == times((1, 0.001), (2, 0.001), (4, 0.001))
    narrow, wide = (
        [rows for rows in some for _ in range(2)] for some in ((1, 2, 4, 8, 16, 32, 36), (64, 128))
    )
    # And what context takes, before steps are long.
    assert engine.widths == [*narrow, *4 * [8], *wide]


def test_an_engine_too_slow_for_the_budget_tells_nothing() -> None:
    engine = TimedEngine(INFO, step_s=2.0, first_s=2.0)
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times == ()
    assert engine.widths == [1]


def test_no_budget_no_step() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    assert profile_target(engine, budget_s=0.0, clock=engine.clock).step_times == ()
    assert engine.widths == []


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"max_num_seqs": 3}, [1, 2, 4, 8]),
        ({"num_blocks": 3}, [1, 2, 4, 8]),
        ({"max_num_batched_tokens": 16}, [1, 2, 4, 8, 16]),
    ],
    ids=["sequences", "blocks", "rows of a step"],
)
def test_widths_stay_within_the_engines_limits(changes: dict[str, int], widths: list[int]) -> None:
    engine = TimedEngine(replace(INFO, **changes), step_s=0.001, first_s=0.001)
    measured = profile_target(engine, budget_s=0.5, clock=engine.clock).step_times
    assert [entry.num_rows for entry in measured] == widths


def test_a_step_that_fails_ends_the_measurement() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.fails = True
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times == ()


FIRST_PASS = [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (32, 8), (36, 9), (64, 8), (128, 8)]
NUM_BEFORE = 2 * 7
"""Steps before contexts are compared."""
PAIR = [(8, 8, 8 * 16), (8, 8, 8 * 128)]


@pytest.mark.parametrize("token_s", [1e-6, 0.0])
def test_what_context_takes_is_told_by_as_many_rows_and_sequences_and_is_no_part_of_step_times(
    token_s: float,
) -> None:
    engine = ReadingEngine(INFO, token_s)
    speed = profile_target(engine, budget_s=5.0, clock=engine.clock)
    assert speed.context_token_s == pytest.approx(token_s)
    assert [entry.num_rows for entry in speed.step_times] == [rows for rows, _ in FIRST_PASS]
    without = [0.0001 * rows + SEQUENCE_S * count for rows, count in FIRST_PASS]
    assert [entry.seconds for entry in speed.step_times] == pytest.approx(without)
    shapes = [shape[:2] for shape in engine.shapes]
    assert shapes[:NUM_BEFORE:2] == FIRST_PASS[:7]
    assert engine.shapes[NUM_BEFORE : NUM_BEFORE + 32] == 16 * PAIR
    assert shapes[NUM_BEFORE + 32 :] == [*2 * FIRST_PASS[7:8], *2 * FIRST_PASS[8:], *3 * FIRST_PASS]


def test_steps_that_another_engine_disturbs_do_not_make_context_dearer() -> None:
    engine = ReadingEngine(INFO, 1e-6)
    # Of sixteen pairs seven with a millisecond more in the step with the long contexts.
    engine.disturbed = {NUM_BEFORE + 2 * pair + 1: 0.001 for pair in range(0, 14, 2)}
    speed = profile_target(engine, budget_s=5.0, clock=engine.clock)
    assert speed.context_token_s == pytest.approx(1e-6)


def test_longer_contexts_that_take_less_do_not_make_context_cost_less_than_nothing() -> None:
    engine = ReadingEngine(INFO, -1e-7)
    speed = profile_target(engine, budget_s=5.0, clock=engine.clock)
    assert speed.context_token_s == 0.0
    # As they were measured, with a context of 128 tokens for every four rows.
    assert speed.step_times[2:4] == times((4, 0.0004072), (8, 0.0008144))


@pytest.mark.parametrize(
    ("changes", "budget_s"), [({"max_num_seqs": 3}, 5.0), ({}, 0.03)], ids=["sequences", "budget"]
)
def test_context_that_cannot_be_told_stays_part_of_step_times(
    changes: dict[str, int], budget_s: float
) -> None:
    engine = ReadingEngine(replace(INFO, **changes), 1e-6)
    speed = profile_target(engine, budget_s=budget_s, clock=engine.clock)
    assert speed.context_token_s == 0.0
    assert speed.step_times[:4] == times((1, 0.000248), (2, 0.000348), (4, 0.000548), (8, 0.001096))


def test_context_is_told_by_fewer_sequences_where_only_these_have_room_twice() -> None:
    engine = ReadingEngine(replace(INFO, max_num_seqs=15), 1e-6)
    assert profile_target(engine, budget_s=5.0, clock=engine.clock).context_token_s == pytest.approx(1e-6)
    assert engine.shapes[NUM_BEFORE : NUM_BEFORE + 2] == [(6, 6, 6 * 16), (6, 6, 6 * 128)]


def test_two_pairs_of_contexts_come_first_and_further_ones_within_their_share_of_the_time() -> None:
    engine = ReadingEngine(INFO, 1e-6)
    profile_target(engine, budget_s=5.0, clock=engine.clock)
    first_s, pair_s = (
        sum(0.0001 * rows + SEQUENCE_S * count + 1e-6 * tokens for rows, count, tokens in shapes)
        for shapes in (engine.shapes[:NUM_BEFORE], PAIR)
    )
    # Three of ten pairs' time are for them.
    for num_pairs, expected in ((1.1, 1), (2.1, 2), (9.9, 2), (10.1, 3), (13.2, 3), (13.5, 4)):
        engine = ReadingEngine(INFO, 1e-6)
        speed = profile_target(engine, budget_s=first_s + num_pairs * pair_s, clock=engine.clock)
        assert engine.shapes[NUM_BEFORE : NUM_BEFORE + 2 * expected] == expected * PAIR
        assert not {shape[:2] for shape in engine.shapes[NUM_BEFORE + 2 * expected :]} & {PAIR[0][:2]}
        assert speed.context_token_s == pytest.approx(1e-6 if expected > 1 else 0.0)


def test_rows_are_left_a_tenth_of_their_step_at_least() -> None:
    """A step of one sequence that was quick for its context, which takes what larger steps say."""
    engine = ReadingEngine(INFO, 1e-4)
    workload = TargetWorkload(engine)
    assert workload.without_context_s(StepTime(8, 0.030), 1e-4) == pytest.approx(0.030 - 2 * 128 * 1e-4)
    assert workload.without_context_s(StepTime(8, 0.020), 1e-4) == pytest.approx(0.002)
    # Two sequences with four rows each, of which every one after the first costs half a context.
    engine = ReadingEngine(replace(INFO, context_row_share=0.5), 1e-4)
    seconds = TargetWorkload(engine).without_context_s(StepTime(8, 0.080), 1e-4)
    assert seconds == pytest.approx(0.080 - 5 * 128 * 1e-4)


def still() -> float:
    return 0.0


def test_a_real_target_head_computes_the_rows_that_are_claimed() -> None:
    head, runner = toy_target(num_blocks=400, max_model_len=96, max_num_seqs=8)
    measured = profile_target(head, budget_s=1.0, clock=still).step_times
    # Half of the model's length is context; eight sequences of eight rows are the most of a step's tokens.
    assert [entry.num_rows for entry in measured] == [1, 2, 4, 8, 16, 32, 64]
    assert all(entry.seconds > 0 for entry in measured)
    sampled = [step for step in runner.steps if all(item.num_logits for item in step)]
    assert [sum(len(item.token_ids) for item in step) for step in sampled] == [
        *(rows for rows in (1, 2, 4, 8, 16, 32, 64) for _ in range(2)),
        *(3 * (1, 2, 4, 8, 16, 32, 64)),
    ]
    assert {item.start for step in sampled for item in step} == {48}
    head.check_integrity()


def test_a_real_draft_head_drafts_for_as_many_sequences_as_are_claimed() -> None:
    head, runner = toy_draft(num_blocks=400, max_model_len=96, max_num_seqs=8)
    measured = profile_draft(head, budget_s=1.0, clock=still)
    assert [entry.num_rows for entry in measured] == [1, 2, 4, 8]
    drafting = [step for step in runner.steps if all(item.num_logits for item in step)]
    assert [len(step) for step in drafting] == [
        *(rows for rows in (1, 2, 4, 8) for _ in range(2 * 4)),
        *(3 * [rows for rows in (1, 2, 4, 8) for _ in range(4)]),
    ]
    assert {len(item.token_ids) for step in drafting for item in step} == {1}
    head.check_integrity()


class MixtureEngine(TimedEngine):
    """A target of which a step takes 1 ms and its experts: four of 64 for each token of another kind."""

    share = 0.6
    info: EngineInfo

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        kinds = {token % 16 for item in items for token in (*item.token_ids, *item.draft.token_ids)}
        factor = 1 + self.share * (len(kinds) - 1)
        self.disturbed = {len(self.widths): 0.001 * factor + self.disturbed.get(len(self.widths), 0)}
        return replace(super().verify(items), num_experts=4 * len(kinds))


MIXTURE = replace(INFO, vocab_size=1024, experts=RoutedExperts(64, 4))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_experts_share_is_told_by_rows_alike_and_unlike(share: float) -> None:
    engine = MixtureEngine(MIXTURE, step_s=0.0, first_s=0.0)
    engine.share = share
    speed = profile_target(engine, budget_s=5.0, clock=engine.clock)
    assert speed.experts is not None
    assert replace(speed.experts, share=0.0) == MIXTURE.experts
    assert speed.experts.share == pytest.approx(share, abs=1e-6)
    # Eight rows are two sequences that hold the same tokens.
    assert [entry.num_experts for entry in speed.step_times[:4]] == [4, 8, 16, 16]


def test_what_experts_take_is_not_told_where_nothing_is_counted_or_time_is_short() -> None:
    uncounted = TimedEngine(MIXTURE, step_s=0.001, first_s=0.001)
    assert profile_target(uncounted, budget_s=5.0, clock=uncounted.clock).experts == MIXTURE.experts
    late = MixtureEngine(MIXTURE, step_s=0.0, first_s=0.0)
    speed = profile_target(late, budget_s=0.005, clock=late.clock)
    assert speed.experts == MIXTURE.experts
