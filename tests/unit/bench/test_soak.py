"""Tests of a soak without a service: its requests, schedule, verdicts and arithmetic."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specray.bench.soak.cases import ClientOutput, Way, difference, make_cases
from specray.bench.soak.clients import draw
from specray.bench.soak.ledger import Attempt, End, Entry, Judgement, Ledger, is_excused, judge
from specray.bench.soak.memory import MemoryRecord, Sample
from specray.bench.soak.plan import SoakPlan
from specray.bench.soak.recovery import back_after_s, changes_of, longest_wait_s
from specray.bench.soak.report import problems, soak_json
from specray.bench.soak.run import Fault, SoakResult
from specray.bench.soak.schedule import (
    HOLD_S,
    FaultKind,
    PlannedFault,
    parse_faults,
    plan_faults,
    possible_faults,
)
from specray.bench.testbed.kinds import BedKind
from specray.cli.bench.soak import print_result as report
from specray.cli.ending import EXIT_INTERRUPTED
from specray.errors import ConfigError

MIB = 1024 * 1024
REFERENCE = ClientOutput("abcdef", (1, 2, 3), 3)
NOTHING = ClientOutput("", None, None)


def attempt(end: End, output: ClientOutput = NOTHING, at_s: float = 10.0) -> Attempt:
    return Attempt(end, output, at_s - 1, at_s, "because")


def verdict(*attempts: Attempt, deaths_s: tuple[float, ...] = (), window_s: float = 60.0) -> Judgement:
    return judge(attempts, REFERENCE, deaths_s=deaths_s, window_s=window_s)[0]


# Requests


def test_cases_are_long_and_short_greedy_and_drawn_and_the_same_for_a_seed() -> None:
    cases = make_cases(30, seed=3)
    assert cases == make_cases(30, seed=3) != make_cases(30, seed=4)
    assert Counter(case.is_long for case in cases) == {True: 15, False: 15}
    assert Counter(case.temperature for case in cases) == {0.0: 10, 1.0: 10, 0.7: 10}
    assert sum(case.frequency_penalty > 0 for case in cases) == 6
    assert all(case.params(has_speculation=False).speculation_enabled is False for case in cases)


def test_the_steady_client_streams_long_outputs_and_never_leaves() -> None:
    cases, rng = make_cases(10, seed=0), random.Random(0)
    for _ in range(50):
        drawn = draw(cases, rng, cancel_share=1.0, is_steady=True)
        assert drawn.case.is_long and drawn.way is not Way.WHOLE and drawn.cancel_after_s is None
    assert draw(cases, rng, cancel_share=1.0, is_steady=False).cancel_after_s is not None
    assert draw(cases, rng, cancel_share=0.0, is_steady=False).cancel_after_s is None


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (REFERENCE, None),
        (ClientOutput("abc", None, None), None),
        (ClientOutput("ab", (1,), None), None),
        (ClientOutput("", (), None), None),
        (ClientOutput("abx", None, None), "the text differs from character 2"),
        (ClientOutput("ab", (1, 7), None), "token 1 differs"),
        (ClientOutput("abcdef", (1, 2, 3, 4), None), "token 3 differs"),
        (ClientOutput("abcdefg", None, 3), "the text differs from character 6"),
        (ClientOutput("abcd", None, 2), "2 tokens, not 3"),
    ],
)
def test_an_output_is_the_reference_or_a_beginning_of_it(output: ClientOutput, what: str | None) -> None:
    assert difference(output, REFERENCE) == what


# The schedule


def test_link_and_node_faults_need_a_bed_that_has_them() -> None:
    assert set(FaultKind) - set(possible_faults(BedKind.NAMESPACES)) == {
        FaultKind.MODELS_KILL, FaultKind.MODEL_CHURN
    }  # fmt: skip
    assert set(possible_faults(BedKind.NAMESPACES)) - set(possible_faults(BedKind.CLUSTER)) == {
        FaultKind.DRAFT_PARTITION, FaultKind.DRAFT_DELAY, FaultKind.DRAFT_LOSS
    }  # fmt: skip
    assert set(possible_faults(BedKind.CLUSTER)) - set(possible_faults(BedKind.PROCESSES)) == {
        FaultKind.NODE_REMOVE, FaultKind.NODE_DRAIN, FaultKind.DRAFT_UPGRADE
    }  # fmt: skip
    for bed in BedKind:
        assert parse_faults("all", bed) == possible_faults(bed)
    assert parse_faults("node-drain", BedKind.CLUSTER) == (FaultKind.NODE_DRAIN,)
    assert parse_faults("router-kill, draft-kill,router-kill", BedKind.PROCESSES) == (
        FaultKind.ROUTER_KILL, FaultKind.DRAFT_KILL
    )  # fmt: skip


@pytest.mark.parametrize("name", ["draft-loss", "draft-klil"])
def test_a_fault_that_the_bed_cannot_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--faults has '{name}'; allowed on the test bed processes: all"):
        parse_faults(name, BedKind.PROCESSES)


def test_schedule_is_even_in_time_and_kind_and_follows_its_seed() -> None:
    kinds = possible_faults(BedKind.NAMESPACES)
    planned = plan_faults(kinds, num_faults=31, first_s=30, last_s=570, seed=5)
    assert planned == plan_faults(kinds, num_faults=31, first_s=30, last_s=570, seed=5)
    assert [fault.at_s for fault in planned] == [30 + 18.0 * index for index in range(31)]
    assert sorted(Counter(fault.kind for fault in planned).values()) == [1] * 5 + [2] * 13
    for fault in planned:
        low, high = HOLD_S.get(fault.kind, (0.0, 0.0))
        assert low <= fault.hold_s <= high


def test_schedule_of_one_and_of_none() -> None:
    (only,) = plan_faults([FaultKind.DRAFT_KILL], num_faults=1, first_s=5, last_s=9, seed=0)
    assert only == PlannedFault(FaultKind.DRAFT_KILL, 5.0)
    assert plan_faults([], num_faults=3, first_s=0, last_s=1, seed=0) == ()
    assert plan_faults([FaultKind.DRAFT_KILL], num_faults=0, first_s=0, last_s=1, seed=0) == ()


# The ledger


def test_whole_output_is_right_and_a_changed_one_is_wrong_whatever_ended_it() -> None:
    wrong = ClientOutput("abX", None, None)
    assert verdict(attempt(End.DONE, REFERENCE)) is Judgement.OK
    assert verdict(attempt(End.CANCELLED, ClientOutput("ab", None, None))) is Judgement.CANCELLED
    for end in End:
        assert verdict(attempt(end, wrong), deaths_s=(9.0,)) is Judgement.WRONG


def test_a_retriable_error_is_excused_once_after_a_routers_death() -> None:
    broken = attempt(End.RETRIABLE, ClientOutput("abc", None, None))
    again = attempt(End.DONE, REFERENCE, at_s=30)
    assert verdict(broken, again, deaths_s=(9.0,)) is Judgement.RETRIED
    assert verdict(broken, attempt(End.CANCELLED, at_s=30), deaths_s=(9.0,)) is Judgement.CANCELLED
    assert verdict(broken, again) is Judgement.FAILED
    assert verdict(broken, again, deaths_s=(11.0,)) is Judgement.FAILED
    assert verdict(broken, attempt(End.RETRIABLE, at_s=30), deaths_s=(9.0,)) is Judgement.FAILED
    assert verdict(attempt(End.ERROR), deaths_s=(9.0,)) is Judgement.FAILED
    assert verdict(broken, attempt(End.ERROR, at_s=30), deaths_s=(9.0,)) is Judgement.FAILED


def test_the_window_after_a_death_has_an_end() -> None:
    assert [is_excused(at_s, (100.0,), 60.0) for at_s in (99.9, 100.0, 160.0, 160.1)] == [
        False, True, True, False
    ]  # fmt: skip


def test_ledger_counts_all_and_keeps_the_bad_ones() -> None:
    ledger = Ledger()
    for kind in (Judgement.OK, Judgement.OK, Judgement.FAILED, Judgement.WRONG, Judgement.CANCELLED):
        ledger.add(Entry(0, Way.GRPC, kind, "why", 0.0, 1.0))
    assert ledger.counts == {"ok": 2, "retried": 0, "cancelled": 1, "failed": 1, "wrong": 1}
    assert (ledger.num_requests, ledger.ways["grpc"]) == (5, 5)
    assert [entry.verdict for entry in ledger.bad] == [Judgement.FAILED, Judgement.WRONG]


# Recovery


def test_wait_is_counted_from_the_fault_or_the_text_after_it() -> None:
    # Text until 9.9, nothing until 13; another stream goes on at 10.5 and then waits until 12.
    streams = [[5.0, 9.0, 9.9, 13.0, 13.1], [8.0, 9.8, 10.5, 12.0]]
    assert longest_wait_s(streams, 10.0, 20.0) == 3.0
    assert longest_wait_s(streams[1:], 10.0, 20.0) == 1.5
    assert longest_wait_s(streams[1:], 10.0, 10.75) == 0.5


def test_streams_that_began_later_or_never_went_on_say_nothing() -> None:
    assert longest_wait_s([[11.0, 14.0], [9.0], []], 10.0, 20.0) is None
    assert longest_wait_s([[9.0, 12.5]], 10.0, 20.0) == 2.5


def test_speculation_is_back_where_the_longest_stand_of_its_counter_ends() -> None:
    readings = [(0.0, 5.0), (1.0, 6.0), (2.0, 7.0), (3.0, 7.0), (8.0, 7.0), (8.5, 9.0), (9.0, 1.0)]
    changes = changes_of(readings)
    assert changes == [1.0, 2.0, 8.5, 9.0]
    assert back_after_s(changes, 2.5, 20.0) == 6.0
    assert back_after_s([1.0, 2.0, 2.5, 3.0], 2.1, 20.0) == 0.0
    assert back_after_s([1.0, 2.0], 2.5, 20.0) is None


def test_what_the_next_fault_does_is_not_the_last_ones() -> None:
    # It comes at 4; the stream and the counter stand until 9 because of it.
    assert longest_wait_s([[1.0, 2.0, 2.5, 3.75, 9.0]], 2.0, 4.0) == 1.25
    assert back_after_s([1.0, 2.0, 2.75, 3.5, 9.0], 2.0, 4.0) == 0.0
    assert back_after_s([1.0, 2.0, 3.5, 9.0], 2.0, 4.0) == 1.5


# Memory


def samples(values: list[float]) -> MemoryRecord:
    record = MemoryRecord(warmup_s=20, min_span_s=20)
    for index, mib in enumerate(values):
        record.add(7, "router", Sample(100 + 5.0 * index, round(mib * MIB)))
    return record


def test_growth_is_that_after_warm_up_between_medians_of_three() -> None:
    (growth,) = samples([50, 60, 70, 80, 100, 100, 999, 101, 101, 1, 104, 104]).growths()
    assert (growth.first_bytes, growth.last_bytes) == (100 * MIB, 104 * MIB)
    assert growth.share == pytest.approx(0.04)
    assert growth.span_s == 35


def test_a_process_that_lived_too_short_is_not_judged() -> None:
    assert samples([50, 60, 70, 80, 100, 100, 100, 200]).growths() == ()
    assert samples([50, 60, 70, 80, 100, 100, 100, 200]).num_processes == 1


def test_what_a_process_took_at_the_first_fault_of_a_kind_is_no_growth() -> None:
    # Samples at 100, 105, ...; warm at 120 by its age, at 130 by the faults.
    record = samples([50, 60, 70, 80, 90, 95, 100, 100, 100, 101, 101, 101])
    (before,) = record.growths()
    record.warm_from(130)
    (after,) = record.growths()
    assert (before.first_bytes, before.last_bytes) == (95 * MIB, 101 * MIB)
    assert (after.first_bytes, after.last_bytes) == (100 * MIB, 101 * MIB)


def test_a_young_process_has_its_own_warm_up_after_the_first_faults() -> None:
    record = samples([50, 60, 70, 80, 100, 100, 100, 101, 101, 101])
    record.warm_from(105)
    (growth,) = record.growths()
    assert (growth.first_bytes, growth.last_bytes) == (100 * MIB, 101 * MIB)


@pytest.mark.parametrize(("num_faults", "rehearsal"), [(40, 18), (36, 18), (35, 0), (0, 0)])
def test_each_kind_is_rehearsed_once_if_each_comes_again(num_faults: int, rehearsal: int) -> None:
    plan = SoakPlan(testbed=BedKind.NAMESPACES, num_faults=num_faults)
    assert plan.rehearsal == rehearsal
    faults = plan_faults(plan.kinds, num_faults=num_faults, first_s=20, last_s=585, seed=plan.seed)
    assert len({fault.kind for fault in faults[:rehearsal]}) == rehearsal


# The report


def result_of(**changes: object) -> SoakResult:
    plan = SoakPlan()
    fault = Fault(FaultKind.DRAFT_KILL, 30.0, 0.0, "draft 7", 4.0, 5.0, 0.2, 4.5)
    result = SoakResult(plan, duration_s=600.0, faults=[fault], blocks={"target": 0.0, "draft": 0.0})
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_a_good_soak_has_no_problems_and_says_so_in_json() -> None:
    values = soak_json(result_of())
    assert values["problems"] == []
    assert values["faults"] == [
        {
            "kind": "draft-kill", "at_s": 30.0, "hold_s": 0.0, "detail": "draft 7", "parts_after_s": 4.0,
            "whole_after_s": 5.0, "longest_wait_s": 0.2, "speculation_after_s": 4.5,
        }
    ]  # fmt: skip


def test_every_kind_of_harm_is_a_problem_of_its_own() -> None:
    ledger = Ledger()
    ledger.add(Entry(0, Way.GRPC, Judgement.FAILED, "why", 0.0, 1.0))
    ledger.add(Entry(0, Way.GRPC, Judgement.WRONG, "why", 0.0, 1.0))
    found = problems(
        result_of(
            ledger=ledger,
            blocks={"target": 3.0, "draft": None},
            growths=samples([100] * 12 + [103] * 12).growths(),
            faults=[Fault(FaultKind.TARGET_KILL, 1.0, 0.0, "not done: nobody", is_over=True, is_done=False)],
            num_not_injected=2,
        )
    )
    assert found == (
        "1 failed requests",
        "1 requests with wrong tokens",
        "3 leaked blocks of the target",
        "no reading of the draft's blocks in use",
        "router (process 7) grew by 3.0 % in 95 s",
        "1 faults after which the service was not whole in time",
        "2 faults for which no time was left",
        "target-kill at 1 s: not done: nobody",
    )
    allowed = result_of(growths=samples([100] * 12 + [103] * 12).growths(), plan=SoakPlan(max_growth=0.031))
    assert not problems(allowed)


@pytest.mark.parametrize(
    ("kind", "wait_s", "speculation_s", "problem"),
    [
        (FaultKind.DRAFT_KILL, 2.1, 4.0, "draft-kill at 9 s: a stream waited 2.1 s; allowed: 2"),
        (FaultKind.NODE_REMOVE, 2.1, 4.0, "node-remove at 9 s: a stream waited 2.1 s; allowed: 2"),
        (FaultKind.DRAFT_KILL, 2.0, 19.0, None),
        (FaultKind.DRAFT_KILL, 0.1, 19.1, "draft-kill at 9 s: a draft was unused for 15.1 s; allowed: 15"),
        (FaultKind.TARGET_STOP, 20.0, 4.0, None),
        (FaultKind.TARGET_KILL, 20.1, 4.0, "target-kill at 9 s: a stream waited 20.1 s; allowed: 20"),
        (FaultKind.ROUTER_KILL, 20.1, 4.0, "router-kill at 9 s: a stream waited 20.1 s; allowed: 20"),
        (FaultKind.INGRESS_HANG, 40.0, 4.0, None),
        (FaultKind.INGRESS_HANG, 40.1, 4.0, "ingress-hang at 9 s: a stream waited 40.1 s; allowed: 40"),
        (FaultKind.CONTROLLER_KILL, 2.1, 4.0, "controller-kill at 9 s: a stream waited 2.1 s; allowed: 2"),
        (FaultKind.DRAFT_DELAY, None, None, None),
    ],
)
def test_what_takes_too_long_after_a_fault_is_a_problem(
    kind: FaultKind, wait_s: float | None, speculation_s: float | None, problem: str | None
) -> None:
    fault = Fault(kind, 9.0, 0.0, "", 4.0, 5.0, wait_s, speculation_s)
    assert problems(result_of(faults=[fault])) == (() if problem is None else (problem,))


def test_what_an_interruption_left_open_is_no_problem_and_what_was_seen_before_is() -> None:
    faults = [
        Fault(FaultKind.DRAFT_KILL, 9.0, 0.0, "draft 7", 4.0, 5.0, 2.1, 4.0, is_over=True),
        Fault(FaultKind.NODE_REMOVE, 20.0, 3.0),
    ]
    result = result_of(faults=faults, blocks={"target": None, "draft": 1.0}, is_interrupted=True)
    assert problems(result) == (
        "1 leaked blocks of the draft",
        "draft-kill at 9 s: a stream waited 2.1 s; allowed: 2",
    )
    assert soak_json(result)["is_interrupted"] is True


def test_an_interrupted_soak_prints_its_report_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    held = result_of(faults=[Fault(FaultKind.NODE_REMOVE, 20.0, 3.0)], is_interrupted=True, duration_s=25.0)
    assert report(held) == EXIT_INTERRUPTED
    said = capsys.readouterr().out
    assert "Requests in 25 s" in said
    assert said.endswith("interrupted after 1 of 30 faults in 25 s\nall held\n")
    bad = result_of(blocks={"target": 1.0, "draft": 0.0}, is_interrupted=True)
    assert report(bad) == 1
    assert capsys.readouterr().out.endswith("not held: 1 leaked blocks of the target\n")


def test_those_of_whom_nobody_lived_long_enough_are_named() -> None:
    record = samples([1.0] * 100)
    for pid, name in ((8, "router"), (9, "draft")):
        record.add(pid, name, Sample(0.0, MIB))
    assert record.unjudged() == ("draft",)


def test_less_than_two_mebibytes_is_no_growth() -> None:
    assert not problems(result_of(growths=samples([10] * 12 + [11.9] * 12).growths()))
    assert len(problems(result_of(growths=samples([10] * 12 + [12.1] * 12).growths()))) == 1


def test_the_course_of_a_long_life_is_told_in_few_samples() -> None:
    (growth,) = samples([1.0] * 100).growths()
    assert growth.course_bytes == (MIB,) * 34
