"""Advice on drafts: predictions, ranking and what would change it, with numbers worked by hand.

The target's step takes 9 ms and 1 ms for each row.
"""

from __future__ import annotations

import pytest

from specray.bench.advise.advice import Advice, Measured, advise
from specray.bench.advise.candidate import Candidate, candidates_of
from specray.bench.advise.figures import Likeness, ProposeTime, Times, VerifyTime
from specray.bench.advise.report import (
    advice_chart,
    advice_config,
    advice_json,
    advice_tables,
    check_table,
    predicted_at_one,
)
from specray.bench.methods.method import ALL, Tally
from specray.config import parse_config
from specray.engine_info import StepTime
from specray.requests import SpeculationStats

TARGET_STEPS = tuple(StepTime(rows, 0.009 + 0.001 * rows) for rows in (1, 2, 4, 8))
PLAIN = Times(8, TARGET_STEPS)


def like(k: int, tau: float, *rates: float, drafts: float | None = None) -> Likeness:
    acceptance = sum(rates) / len(rates)
    return Likeness(0.0, ALL, k, tau, float(k) if drafts is None else drafts, acceptance, rates, 10)


def measured(name: str, draft_s: float | None, *likenesses: Likeness) -> Measured:
    config = parse_config({"draft": {"model": "ngram"}} if draft_s is None else {})
    steps = () if draft_s is None else (StepTime(1, draft_s),)
    return Measured(Candidate(name, config), likenesses, (), Times(8, TARGET_STEPS, draft_steps=steps))


# A round of one sequence: V(3) = 12 ms, two draft steps, and 0.04 ms of the router.
QUICK = measured("quick", 0.001, like(2, 2.2, 0.7, 0.7), like(4, 2.5, 0.7, 0.7, 0.5, 0.4))
LIKELY = measured("likely", 0.004, like(2, 2.4, 0.8, 0.75))
FREE = measured("free", None, like(1, 1.5, 0.5))
QUICK_RATE = 2.2 / 0.01404


def advice_of(*candidates: Measured, concurrencies: tuple[int, ...] = (1, 8), most: int = 64) -> Advice:
    return advise(candidates, PLAIN, temperature=0.0, concurrencies=concurrencies, most_sequences=most)


def test_quick_draft_is_before_a_likelier_one() -> None:
    advice = advice_of(LIKELY, FREE, QUICK)
    assert [entry.name for entry in advice.entries] == ["quick", "free", "likely"]
    first = [entry.first for entry in advice.entries]
    assert [one.k for one in first] == [2, 1, 2]
    assert [one.tokens_per_s for one in first] == pytest.approx([QUICK_RATE, 1.5 / 0.01104, 2.4 / 0.02004])
    assert [one.speedup for one in first] == pytest.approx([QUICK_RATE / 100, 1.5 / 1.104, 2.4 / 2.004])
    assert [entry.latency_ratio for entry in advice.entries] == [pytest.approx(0.1), None, pytest.approx(0.4)]


def test_prediction_at_eight_has_rows_and_handling_of_all_eight() -> None:
    (entry,) = advice_of(QUICK).entries
    # V(24) = 33 ms beside two draft steps and 0.32 ms of the router; plain decoding's V(8) = 17 ms.
    at_eight = entry.predictions[1]
    assert (at_eight.concurrency, at_eight.k, at_eight.is_extrapolated) == (8, 2, False)
    assert at_eight.tokens_per_s == pytest.approx(2.2 / 0.03532)
    assert at_eight.speedup == pytest.approx(2.2 / 0.03532 * 0.017)
    assert advice_of(QUICK, concurrencies=(1, 9)).entries[0].predictions[1].is_extrapolated


def test_batch_from_which_it_stops_paying() -> None:
    # 2.2 / (11 + 3.04 n) = 1 / (9 + n) at n = 8.8 / 0.84 = 10.5; batches are whole.
    assert advice_of(QUICK).entries[0].stops_paying == 11
    assert advice_of(QUICK, most=10).entries[0].stops_paying is None
    useless = measured("useless", 0.01, like(1, 1.1, 0.1))
    advice = advice_of(useless)
    assert (advice.entries[0].stops_paying, advice.winner, advice.largest_batch) == (1, None, 32)


def test_what_would_make_each_the_first() -> None:
    by_name = {entry.name: entry.change for entry in advice_of(QUICK, LIKELY, FREE).entries}
    assert by_name["quick"] is None
    likely, free = by_name["likely"], by_name["free"]
    assert likely is not None and free is not None
    # 2.4 / (12.04 ms + 8 ms * f) is the winner's rate.
    assert likely.draft_factor == pytest.approx((2.4 / QUICK_RATE - 0.01204) / 0.008, abs=1e-5)
    # Half of the tokens is rejected: 2 - x / 2 tokens per round with the share x of the rejections.
    share = 2 * (2 - 0.01104 * QUICK_RATE)
    assert free.draft_factor is None
    assert (free.rejections, free.acceptance) == pytest.approx((share, 1 - share / 2), abs=1e-5)


def test_no_acceptance_makes_one_draft_token_the_first() -> None:
    poor = measured("poor", None, like(1, 1.1, 0.5, drafts=0.2))
    change = advice_of(QUICK, poor).entries[1].change
    # Every token accepted would be 1.2 tokens in V(1) = 10.04 ms.
    assert change is not None and (change.rejections, change.acceptance) == (None, None)


def test_fewer_rejections_reach_depths_that_nothing_reached() -> None:
    one = Likeness(0.0, ALL, 3, 1.5, 3.0, 0.4, (0.5, 0.0), 10)
    assert one.tau_with(1.0) == pytest.approx(1.5)
    assert one.tau_with(0.0) == pytest.approx(4.0)
    # Depths 1 to 3 with half of the rejections: 0.75, 0.5 and 0.7.
    assert one.tau_with(0.5) == pytest.approx(1 + 0.75 + 0.375 + 0.2625)


def test_likeness_of_a_tally() -> None:
    tally = Tally()
    tally.begin_turn()
    # Four rounds with two draft tokens each, of which 0, 0, 1 and 2 were accepted; one round with none.
    stats = SpeculationStats(4, 8, 3, (2, 1, 1))
    tally.add(stats, num_tokens=8, seconds=0.0, draft_s=0.0, is_equal=True)
    one = Likeness.of(0.0, ALL, 2, tally)
    assert (one.num_rounds, one.tokens_per_round, one.drafts_per_round) == (5, 1.6, 1.6)
    assert (one.by_depth, one.survival) == ((0.5, 0.5), (0.5, 0.25))
    assert one.acceptance == 3 / 6


def test_measured_steps_replace_what_the_target_says() -> None:
    steps = tuple(VerifyTime(float(n), 1, 1, 1, 0.02) for n in range(20))
    asked = tuple(ProposeTime(n + 0.5, 1, 2, 1, 0.006, 0.001) for n in range(20))
    times = Times(1, TARGET_STEPS, draft_steps=(StepTime(1, 0.003),), verify=steps, propose=asked)
    cost = times.cost_model()
    assert cost.verify_s(1, 1) == pytest.approx(0.02)
    assert cost.draft_step_s(1, 0.0) == pytest.approx(0.003, rel=0.05)
    assert cost.round_trip_s == pytest.approx(0.001)
    assert times.verify_s() == {1: 0.02}
    halved = times.cost_model(draft_factor=0.5)
    assert halved.draft_step_s(1, 0.0) == pytest.approx(0.0015, rel=0.05)
    assert times.cost_model(draft_factor=0.0).draft_step_s(1, 0.0) < 1e-9


def test_steps_of_a_busy_moment_count_in_part() -> None:
    seconds = (0.01, 0.01, 0.01, 0.1)
    steps = tuple(VerifyTime(float(n), 1, 2, 2, one) for n, one in enumerate(seconds))
    assert Times(1, verify=steps).verify_s() == {2: pytest.approx((3 * 0.01 + 0.015) / 4)}


def test_configuration_serves_the_winner_or_the_target_alone() -> None:
    target = parse_config({"target": {"max_num_seqs": 16}})
    tree = Candidate("embedded:2x2", parse_config({}), "2x2", "embedded")
    winner = Measured(tree, (like(2, 2.6, 0.8, 0.8),), (), QUICK.times)
    text = advice_config(advice_of(winner, FREE), target)
    assert (
        "tree: 2x2" in text and "model: embedded" in text and text.startswith("# Predicted to be best at 1")
    )
    served = advice_of(winner, FREE).serving_config(target)
    assert (served.speculation.tree, served.speculation.num_speculative_tokens) == ("2x2", "auto")
    useless = advice_of(measured("useless", 0.01, like(1, 1.1, 0.1)))
    alone = useless.serving_config(target)
    assert (alone.draft.enabled, alone.target.max_num_seqs) == (False, 16)
    assert "enabled: false" in advice_config(useless, target)


def test_report_has_every_candidate() -> None:
    advice = advice_of(QUICK, LIKELY, FREE)
    ranking, changes, likeness, _ = advice_tables(advice)
    assert (ranking.row_count, changes.row_count, likeness.row_count) == (4, 3, 3)
    values = advice_json(advice)
    assert (values["winner"], [one["name"] for one in values["ranking"]]) == (
        "quick",
        ["quick", "free", "likely"],
    )
    assert values["plain"]["tokens_per_s"] == {"1": pytest.approx(100.0), "8": pytest.approx(1 / 0.017)}
    assert all(f">{name}<" in advice_chart(advice) for name in ("quick", "likely", "free"))


def test_check_puts_predictions_beside_measurements() -> None:
    advice = advice_of(QUICK, FREE)
    assert predicted_at_one(advice) == pytest.approx({"quick": 1.5670, "free": 1.3587}, abs=1e-4)
    table = check_table(advice, {"free": 1.25, "quick": 1.5})
    assert [list(column.cells) for column in table.columns] == [
        ["quick", "free"],
        ["1.57x", "1.36x"],
        ["1.50x", "1.25x"],
        ["1.04", "1.09"],
    ]
    assert predicted_at_one(advice_of(QUICK, concurrencies=(8,))) == {}


def test_rows_of_a_tree_are_those_of_its_depths() -> None:
    tree = candidates_of({"embedded": parse_config({})}, ["4x2x1"])[1]
    chain = Measured(tree, (like(3, 2.0, 0.5, 0.5, 0.5, drafts=20.0),), (), wide_draft())
    (entry,) = advice_of(chain, concurrencies=(1,)).entries
    # The steps have 1, 4 and 8 rows: 13 / 3 on average, so 4; the target has 21. Two tokens to read are two
    # rows in the first step, which is 1 ms more.
    assert entry.first.tokens_per_s == pytest.approx(2.0 / (0.030 + 3 * 0.004 + 0.001 + 40e-6))


def wide_draft() -> Times:
    """A draft whose step takes 1 ms for each row."""
    return Times(8, TARGET_STEPS, draft_steps=tuple(StepTime(rows, 0.001 * rows) for rows in (1, 2, 4, 8)))
