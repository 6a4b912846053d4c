"""How many experts rows hit, what that makes of a step, and what is learnt from counts."""

from __future__ import annotations

import random

import pytest

from specray.control.cost_model import CostModel
from specray.control.experts import PRIOR_EXPONENTS, ExpertUse
from specray.control.target_times import TargetTimes
from specray.engine_info import RoutedExperts, StepTime

QWEN = RoutedExperts(128, 8, 0.54)
EVEN = (1.0, 1.0)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "multiples"),
    [
        (8, 2, (1.75, 2.31, 2.73, 3.60, 3.96)),
        (128, 8, (1.94, 2.82, 3.64, 6.45, 10.3)),
        (512, 10, (1.98, 2.94, 3.88, 7.47, 13.9)),
    ],
)
def test_rows_that_choose_evenly_and_apart_hit_what_moesd_says(
    num_experts: int, num_chosen: int, multiples: tuple[float, ...]
) -> None:
    use = ExpertUse(RoutedExperts(num_experts, num_chosen), *EVEN)
    found = [use.expected(rows, 1) / num_chosen for rows in (2, 3, 4, 8, 16)]
    assert found == pytest.approx(multiples, abs=0.06)
    # Which sequence they are of makes no difference then.
    assert use.expected(16, 4) == use.expected(16, 16) == use.expected(16, 1)


def test_a_steps_factor_is_what_the_experts_share_makes_of_it() -> None:
    use = ExpertUse(QWEN)
    assert use.factor(8) == 1.0
    assert use.factor(24) == pytest.approx(1 - 0.54 + 0.54 * 3)
    assert ExpertUse().factor(24) == ExpertUse().expected_factor(24, 3) == 1.0


def union(sequences: int, rows: int) -> float:
    """Experts of 48 layers of which rows of a sequence hit 8 r^0.68 a layer, and sequences choose apart."""
    own = 8 * rows**0.68
    return float(48 * 128 * (1 - (1 - own / 128) ** sequences))


def test_experts_that_neighbours_share_are_learnt_from_one_sequence_and_hold_for_many() -> None:
    use = ExpertUse(RoutedExperts(48 * 128, 48 * 8, 0.5))
    for step in range(60):
        rows = 2 + step % 7
        use.add(rows, 1, round(union(1, rows)))
    assert use.rows_exponent < 0.75
    for rows in (2, 4, 8):
        assert use.expected(rows, 1) == pytest.approx(union(1, rows), rel=0.04)
    # The draft's rows of eight sequences, of which none was counted together.
    assert use.expected(8 * 4, 8) == pytest.approx(union(8, 4), rel=0.06)
    assert use.expected(8, 1) < 0.65 * use.expected(8, 8)


def test_texts_of_one_kind_share_experts_too_and_both_are_told_apart() -> None:
    truth = ExpertUse(RoutedExperts(4096, 128, 0.5), 0.8, 0.7)
    use = ExpertUse(truth.info)
    shapes = random.Random(0)
    for _ in range(200):
        sequences, each = shapes.choice((1, 2, 4, 8)), shapes.choice((1, 2, 4))
        use.add(sequences * each, sequences, round(truth.expected(sequences * each, sequences)))
    assert (use.sequences_exponent, use.rows_exponent) == pytest.approx((0.8, 0.7), abs=0.02)


@pytest.mark.parametrize(
    ("rows", "count"),
    [(1, 8), (1, 40), (16, 128), (16, 125)],
    ids=["one row", "one row that pads surround", "all", "nearly all"],
)
def test_counts_that_say_nothing_of_rows_change_nothing(rows: int, count: int) -> None:
    use = ExpertUse(QWEN)
    for _ in range(50):
        use.add(rows, 1, count)
    assert (use.sequences_exponent, use.rows_exponent) == PRIOR_EXPONENTS


def test_fewer_experts_than_a_row_has_count_as_those_of_one() -> None:
    use = ExpertUse(QWEN)
    for _ in range(200):
        use.add(8, 1, 3)
    assert use.rows_exponent == pytest.approx(0.1)
    assert use.expected(1, 1) == pytest.approx(8)


def test_branches_of_trees_count_whole() -> None:
    """Nine rows of which eight follow the root count as three; with five branches, four as two and five."""
    use, apart = ExpertUse(QWEN, 1.0, 0.5), ExpertUse(QWEN, *EVEN)
    assert use.expected(9, 1) == pytest.approx(apart.expected(3, 3))
    assert use.expected(9, 1, 5) == pytest.approx(apart.expected(7, 7))


def mixture(share: float = 0.9) -> TargetTimes:
    """Ten ms for a row; neighbours share half of what they could."""
    return TargetTimes(experts=ExpertUse(RoutedExperts(1280, 80, share), 1.0, 0.5))


def test_eight_rows_of_one_sequence_tell_what_eight_sequences_take() -> None:
    """What a table of rows alone takes for the same."""
    target = mixture()
    of_one = target.experts.expected_factor(8, 1)
    of_eight = target.experts.expected_factor(8, 8)
    assert of_eight > 2 * of_one
    for _ in range(3):
        target.add(8, 0.010 * of_one, num_sequences=1)
    assert target.predict(8, 1) == pytest.approx(0.010 * of_one)
    assert target.predict(8, 8) == pytest.approx(0.010 * of_eight)
    assert target.rounds[False].predict(8) == pytest.approx(0.010)


def test_a_step_that_hit_more_than_usual_took_longer_for_that_and_no_row_is_dearer() -> None:
    target = mixture()
    usual = target.experts.expected(4, 1)
    for count in (usual, 1.5 * usual, 0.8 * usual) * 5:
        target.add(4, 0.010 * target.experts.factor(round(count)), num_sequences=1, num_experts=round(count))
    assert target.rounds[False].predict(4) == pytest.approx(0.010)
    assert target.load_factor == pytest.approx(1.0)


def test_steps_with_prompts_hit_nearly_all_and_are_tabled_as_they_are() -> None:
    target = mixture()
    for _ in range(3):
        target.add(64, 0.120, num_sequences=1, num_experts=1200, has_prompt=True)
    assert target.prompts.predict(64) == pytest.approx(0.120)
    assert target.experts.rows_exponent == 0.5


def test_counts_of_trees_leave_what_is_known_of_chains_alone() -> None:
    target = mixture()
    for _ in range(20):
        target.add(8, 0.050, num_sequences=1, num_experts=600, num_branches=4)
    assert target.experts.rows_exponent == 0.5


def expected(share: float, *, count: int, round_trip_s: float = 0.0) -> CostModel:
    cost = CostModel()
    steps = [StepTime(1, 0.010, 80), StepTime(8, 0.010 * (1 + share * (count / 80 - 1)), count)]
    cost.expect_target(steps, round_trip_s, experts=RoutedExperts(1280, 80, share))
    return cost


def test_what_a_target_says_of_its_steps_is_told_apart_from_what_they_hit() -> None:
    """Its own rows were made up, and hit more than a text's do."""
    cost = expected(0.5, count=480)
    assert cost.target.rounds[False].predict(8) == pytest.approx(0.010)
    usual = cost.target.experts.expected_factor(8, 1)
    assert cost.verify_s(8, 1) == pytest.approx(0.010 * usual)
    assert cost.target.prompts.predict(8) == pytest.approx(0.035)


def test_the_way_to_the_target_is_no_part_of_the_experts_share() -> None:
    cost = expected(0.5, count=80, round_trip_s=0.010)
    assert cost.target.experts.info == RoutedExperts(1280, 80, 0.25)


def test_a_target_that_comes_back_keeps_its_counts_and_another_begins_anew() -> None:
    cost = expected(0.5, count=480)
    for _ in range(50):
        cost.target.add(8, 0.020, num_sequences=1, num_experts=200)
    learnt = cost.target.experts.rows_exponent
    assert learnt < 0.6
    cost.expect_target([StepTime(1, 0.010)], 0.002, experts=RoutedExperts(1280, 80, 0.5))
    assert cost.target.experts.rows_exponent == learnt
    cost.expect_target([StepTime(1, 0.010)], 0.002, experts=RoutedExperts(640, 80, 0.5))
    assert cost.target.experts.rows_exponent == PRIOR_EXPONENTS[1]
    cost.expect_target([StepTime(1, 0.010)], 0.002)
    assert cost.target.experts.info is None and cost.verify_s(8, 1) == cost.verify_s(8, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((8, 8, 0.5), "num_chosen is 8; allowed: 1..7"),
        ((8, 0, 0.5), "num_chosen is 0; allowed: 1..7"),
        ((8, 2, 1.0), "share is 1.0; allowed: 0 or more, below 1"),
    ],
)
def test_experts_that_cannot_be_are_refused(values: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExperts(*values)
