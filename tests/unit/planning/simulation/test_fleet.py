"""Tests of fleets in virtual time: cases that can be computed by hand, and the same run twice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specray.config import RouterConfig, SpeculationConfig
from specray.planning.load import ClosedLoad, FixedLength, LognormalLength, OpenLoad
from specray.planning.profile import RouterProfile
from specray.planning.simulation.fleet import Kit
from specray.planning.simulation.results import Slo, TimeWindow, spread
from specray.planning.simulation.runs import simulate, simulate_closed, simulate_saturated
from tests.unit.planning.parts import (
    PREFILL_S,
    PROPOSE_S,
    VERIFY_S,
    acceptance,
    draft,
    linear,
    output,
    plain_kit,
    replayed,
    serial_kit,
    target,
)

pytestmark = pytest.mark.slow


def one_client(num_requests: int, output: int) -> ClosedLoad:
    return ClosedLoad(1, num_requests, FixedLength(100), FixedLength(output))


def seconds_of(kit: Kit, load: ClosedLoad) -> float:
    return simulate_closed(kit, load).window_s


def test_plain_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    run = simulate_closed(plain_kit(), one_client(5, 11), num_drafts=0)
    assert run.window_s == pytest.approx(5 * (PREFILL_S + 10 * VERIFY_S), rel=1e-9)
    assert run.tokens_per_s == pytest.approx(11 / (PREFILL_S + 10 * VERIFY_S), rel=1e-9)
    assert run.ttft_ms is not None and run.ttft_ms.p95 == pytest.approx(1e3 * PREFILL_S)
    assert run.itl_ms is not None and run.itl_ms.p50 == pytest.approx(1e3 * VERIFY_S)
    assert run.target_utilisation == pytest.approx(1.0)
    assert run.tokens_per_round == 1.0


def test_transport_and_the_routers_own_time_are_part_of_every_step() -> None:
    router = RouterProfile(verify_after_verdict=linear(0.001, 0.0005))
    kit = replace(plain_kit(transport=linear(0.002)), router=router)
    assert seconds_of(kit, one_client(3, 11)) == pytest.approx(
        3 * (PREFILL_S + 10 * VERIFY_S + 11 * 0.0035), rel=1e-9
    )


def test_sessions_share_steps() -> None:
    load = ClosedLoad(8, 8, FixedLength(10), FixedLength(11))
    run = simulate_closed(plain_kit(), load, num_drafts=0)
    # All prompts together, which each would read the weights for VERIFY_S, but do so once; then ten steps.
    assert run.window_s == pytest.approx(8 * PREFILL_S - 7 * VERIFY_S + 10 * VERIFY_S, rel=1e-6)


def test_serial_rounds_with_a_perfect_draft() -> None:
    # The draft is asked for its first proposal beside the prompt; the prompt's step gives its first token.
    kit = serial_kit(3)
    assert seconds_of(kit, one_client(1, 1 + 3)) == pytest.approx(PREFILL_S + VERIFY_S, rel=1e-3)
    further = seconds_of(kit, one_client(1, 1 + 3 + 40)) - seconds_of(kit, one_client(1, 1 + 3))
    assert further == pytest.approx(10 * (PROPOSE_S + VERIFY_S), rel=1e-9)


def test_a_useless_draft_gives_one_token_a_round() -> None:
    run = simulate_closed(serial_kit(3, rate=0.0), one_client(1, 41))
    assert run.tokens_per_round == 1.0
    assert run.window_s == pytest.approx(PREFILL_S + 40 * VERIFY_S + 39 * PROPOSE_S, rel=0.02)


def test_tokens_of_a_round_follow_the_rates_of_the_positions() -> None:
    speculation = SpeculationConfig.model_validate({"num_speculative_tokens": 2, "overlap": "serial"})
    by_position = acceptance(0.5).model_copy(update={"by_position": (0.5, 0.8)})
    kit = Kit(target(), draft(), by_position, speculation=speculation)
    # 4,200 rounds of 1.9 tokens and a deviation of 0.94: a standard error of 0.8 %.
    run = simulate_closed(kit, ClosedLoad(40, 40, FixedLength(100), FixedLength(201)))
    assert run.tokens_per_round == pytest.approx(1 + 0.5 + 0.5 * 0.8, rel=0.03)


def test_network_between_router_and_draft_is_paid_in_every_serial_round() -> None:
    near, far = serial_kit(3), replace(serial_kit(3), network_s=0.006)
    load, shorter = one_client(1, 45), one_client(1, 5)
    extra = (seconds_of(far, load) - seconds_of(far, shorter)) - (
        seconds_of(near, load) - seconds_of(near, shorter)
    )
    assert extra == pytest.approx(10 * 0.006, rel=1e-6)


def test_outcomes_hide_the_draft_behind_the_target() -> None:
    speculation = SpeculationConfig.model_validate({"num_speculative_tokens": 3, "overlap": "enumerate"})
    outcomes = [{"num_branches": 1, "num_tokens": 1, "seconds": 0.5 * VERIFY_S}]
    kit = Kit(target(), draft(outcomes=outcomes), acceptance(1.0), speculation=speculation)
    few, many = one_client(1, 45), one_client(1, 85)
    assert seconds_of(kit, many) - seconds_of(kit, few) == pytest.approx(10 * VERIFY_S, rel=1e-6)


def test_two_routers_wait_for_one_draft() -> None:
    # A draft step as long as a target step: one group is served in turns, and of two groups that
    # share the draft each works while the other drafts.
    slow = draft(propose=[{"num_sequences": 1, "num_tokens": 1, "seconds": VERIFY_S}])
    kit = replace(serial_kit(3), draft=slow)
    load = ClosedLoad(2, 2, FixedLength(10), FixedLength(5 + 400))
    own = simulate_closed(kit, load, num_groups=2, num_drafts=2, seed=3)
    shared = simulate_closed(kit, load, num_groups=2, num_drafts=1, seed=3)
    assert own.draft_utilisation is not None and shared.draft_utilisation is not None
    assert shared.draft_utilisation > 1.5 * own.draft_utilisation
    assert shared.window_s >= own.window_s


def test_a_step_beside_the_draft_is_slower_where_they_share_hardware() -> None:
    speculation = SpeculationConfig.model_validate({"num_speculative_tokens": 3, "overlap": "enumerate"})
    outcomes = [{"num_branches": 1, "num_tokens": 1, "seconds": VERIFY_S}]
    kit = Kit(
        target(slowdown_beside_draft=2.0),
        draft(outcomes=outcomes),
        acceptance(1.0),
        speculation=speculation,
    )
    apart = seconds_of(kit, one_client(1, 45))
    together = seconds_of(replace(kit, shares_hardware=True), one_client(1, 45))
    # While the draft works, for VERIFY_S, a step does half of its work; then the other half alone.
    assert together == pytest.approx(apart + 11 * VERIFY_S / 2, rel=1e-6)


def test_requests_at_equal_intervals_meet_an_idle_target() -> None:
    load = OpenLoad(5.0, FixedLength(10), FixedLength(1), is_poisson=False)
    run = simulate(plain_kit(), load, TimeWindow(1.1, 10.0), num_groups=1, num_drafts=0, slo=Slo(ttft_ms=21))
    assert (run.num_requests, run.num_met, run.num_refused) == (50, 50, 0)
    assert run.tokens_per_s == pytest.approx(5.0)
    assert run.target_utilisation == pytest.approx(5.0 * PREFILL_S)
    assert run.ttft_ms is not None and run.ttft_ms.p95 == pytest.approx(1e3 * PREFILL_S)


def waits_and_service(load: OpenLoad, service_s: float, begin_s: float, end_s: float) -> list[float]:
    """Seconds from arrival to end, in a queue with one place, of the requests that arrive in an interval.

    By Lindley's recursion.
    """
    seconds, free_s = [], 0.0
    for arrived_s in load.arrivals(random.Random("1-arrivals")):
        if arrived_s >= end_s:
            return seconds
        free_s = max(free_s, arrived_s) + service_s
        if arrived_s >= begin_s:
            seconds.append(free_s - arrived_s)
    raise AssertionError("arrivals have no end")


def test_poisson_arrivals_wait_as_in_a_queue_with_one_place() -> None:
    # One place, so that requests are served one after the other: a queue with a fixed service time.
    kit = plain_kit(max_num_seqs=1)
    load = OpenLoad(0.7 / PREFILL_S, FixedLength(10), FixedLength(1))
    run = simulate(kit, load, TimeWindow(2.0, 10.0), num_groups=1, num_drafts=0, slo=Slo(), seed=1)
    expected = waits_and_service(load, PREFILL_S, 2.0, 12.0)
    assert (run.num_requests, run.num_met) == (len(expected), len(expected))
    assert run.ttft_ms is not None
    by_hand = spread((seconds, 1.0) for seconds in expected)
    assert by_hand is not None and by_hand.p95 > 2.0 * by_hand.p50 > 2.0 * PREFILL_S * 1e3
    assert run.ttft_ms.p50 == pytest.approx(by_hand.p50, rel=1e-6)
    assert run.ttft_ms.p95 == pytest.approx(by_hand.p95, rel=1e-6)
    # What arrives within the window is worked off there, but for what waits at its ends.
    assert run.target_utilisation == pytest.approx(len(expected) * PREFILL_S / 10.0, abs=0.03)


def test_arrivals_make_an_m_d_1_queue() -> None:
    # Erlang's distribution of the wait at 0.7: medians and percentiles of wait and service, in services.
    load = OpenLoad(0.7 / PREFILL_S, FixedLength(10), FixedLength(1))
    seconds = sorted(waits_and_service(load, PREFILL_S, 5.0, 1005.0))
    assert len(seconds) * PREFILL_S / 1000.0 == pytest.approx(0.7, rel=0.02)
    assert seconds[len(seconds) // 2] / PREFILL_S == pytest.approx(1.730, rel=0.03)
    assert seconds[len(seconds) * 95 // 100] / PREFILL_S == pytest.approx(5.103, rel=0.06)


def test_a_saturated_target_gives_no_more_than_one_over_its_service_time() -> None:
    kit = plain_kit(max_num_seqs=1)
    load = OpenLoad(2 / PREFILL_S, FixedLength(10), FixedLength(1), is_poisson=False)
    run = simulate(kit, load, TimeWindow(2.0, 4.0), num_groups=1, num_drafts=0, slo=Slo(ttft_ms=100))
    assert run.tokens_per_s == pytest.approx(1 / PREFILL_S, rel=0.01)
    assert run.target_utilisation == pytest.approx(1.0)
    assert run.num_met == 0
    assert simulate_saturated(
        kit, load, sessions_per_group=4, num_groups=1, num_drafts=0
    ).tokens_per_s == pytest.approx(1 / PREFILL_S)


def test_full_queues_refuse() -> None:
    config = RouterConfig.model_validate({"max_queued_requests": 2})
    kit = replace(plain_kit(max_num_seqs=1), router_config=config)
    load = OpenLoad(4 / PREFILL_S, FixedLength(10), FixedLength(1), is_poisson=False)
    run = simulate(kit, load, TimeWindow(1.0, 2.0), num_groups=1, num_drafts=0, slo=Slo())
    assert run.num_requests == pytest.approx(400, abs=2)
    assert run.num_refused == pytest.approx(300, abs=4)


def test_sequences_beyond_the_blocks_take_turns_and_all_end() -> None:
    # Room for two sequences of 64 tokens at a time.
    kit = plain_kit(num_blocks=8)
    load = ClosedLoad(6, 6, FixedLength(32), FixedLength(32))
    run = simulate_closed(kit, load, num_drafts=0)
    assert run.num_met == 6
    assert run.window_s > 2 * seconds_of(plain_kit(), load)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    load = OpenLoad(20.0, LognormalLength(50, 150), LognormalLength(30, 80))
    kit = replace(serial_kit(3, rate=0.7), speculation=SpeculationConfig.model_validate({"overlap": "auto"}))

    def run(seed: int) -> object:
        return simulate(kit, load, TimeWindow(0.2, 0.8), num_groups=4, num_drafts=2, slo=Slo(), seed=seed)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_a_hundred_groups_share_drafts() -> None:
    load = OpenLoad(100.0, FixedLength(20), FixedLength(9))
    run = simulate(
        serial_kit(3), load, TimeWindow(0.2, 1.0), num_groups=100, num_drafts=25, slo=Slo(ttft_ms=100)
    )
    assert (run.num_groups, run.num_drafts) == (100, 25)
    assert run.met_share > 0.95


def test_unsure_draft_ends_its_proposals_early_where_the_router_chooses_k() -> None:
    # The draft is right for three tokens and wrong for one, and knows it.
    lengths = [{"min_acceptance": 0.01, "by_position": "3213" * 30}]
    known = output("1110" * 30, lengths=lengths)
    speculation = SpeculationConfig.model_validate({"overlap": "serial", "fallback": "none"})
    points = [{"num_sequences": 1, "num_tokens": k, "seconds": 0.002 * k} for k in (1, 16)]
    kit = Kit(target(), draft(propose=points), replayed(known), speculation=speculation)
    sure = replace(kit, acceptance=replayed(output("1110" * 30)))
    load = one_client(4, 120)
    # It costs rounds nothing, and saves the draft what would have been in vain.
    early, late = simulate_closed(kit, load), simulate_closed(sure, load)
    assert early.tokens_per_round > 0.95 * late.tokens_per_round
    assert early.window_s < 0.97 * late.window_s


def test_fillers_find_what_the_measured_output_repeats() -> None:
    # Twelve tokens again and again, and a draft that is never right.
    repeating = output("0" * 120, tokens=[3 + n % 12 for n in range(120)])
    speculation = SpeculationConfig.model_validate({"overlap": "serial", "fallback": "ngram"})
    kit = Kit(target(), draft(), replayed(repeating), speculation=speculation)
    load = one_client(3, 120)
    with_fillers = simulate_closed(kit, load)
    without = simulate_closed(
        replace(kit, speculation=speculation.model_copy(update={"fallback": "none"})), load
    )
    assert without.tokens_per_round == 1.0
    assert with_fillers.tokens_per_round > 2.0
    # Where no outputs were measured there is nothing to find, and so nothing is looked for.
    drawn = replace(kit, acceptance=acceptance(0.0))
    assert simulate_closed(drawn, load).tokens_per_round == 1.0


def test_replayed_requests_have_their_own_prompts() -> None:
    prompts = [{"num_tokens": n, "seconds": 0.001 * n} for n in (1, 1000)]
    outputs = [output("0", prompt=tuple(range(1, length + 1))) for length in (10, 200)]
    kit = replace(plain_kit(prefill=prompts, verify=[{"num_rows": 1, "seconds": 1e-9}]), is_replay=True)
    run = simulate_closed(replace(kit, acceptance=replayed(*outputs)), one_client(4, 1), num_drafts=0)
    assert run.window_s == pytest.approx(2 * 0.010 + 2 * 0.200, rel=1e-6)
