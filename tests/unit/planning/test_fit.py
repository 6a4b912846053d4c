"""Tests of fitting: a router's trace to steps, and steps to the curves of a profile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specray.fakes.engines import fake_info
from specray.planning.fit import fit_acceptance, fit_draft, fit_router, fit_target, rates_by_position
from specray.planning.profile import LinearTime, TargetProfile
from specray.planning.samples import Samples, Sweep, is_beside, read_hits, read_samples
from specray.router.trace import (
    DraftAsked,
    DraftReplied,
    LookedUp,
    Planned,
    TraceEvent,
    VerdictReceived,
    VerifySent,
)
from tests.unit.planning.parts import output

MS = 1_000_000


def serial_rounds(count: int, k: int, num_rounds: int, *, first_step: int = 0) -> Iterator[TraceEvent]:
    """Rounds of ``count`` sessions, in nanoseconds.

    A target step takes 1 ms for each row, its way 0.5 ms; a draft step 2 ms for each token, its way 0.25 ms;
    the router 0.1 ms before it asks and 0.2 ms before it verifies.
    """
    now = 0
    for number in range(first_step, first_step + num_rounds):
        names = [f"{count}-{k}-{index}" for index in range(count)]
        rows = count * (k + 1)
        for name in names:
            yield VerifySent(now, name, number, number, 10, 1, k)
        now += 500_000 + rows * MS
        for name in names:
            yield VerdictReceived(now, name, number, rows * MS, "model", k, k - 1, k, "profitable")
        now += 100_000
        for name in names:
            yield DraftAsked(now, name, number, 10, 1, k, ())
        now += 250_000 + 2 * k * MS
        for name in names:
            yield DraftReplied(now, name, number, "proposal", 2 * k * MS, k, 0, False)
        now += 200_000


def prompts(*lengths: int) -> Iterator[TraceEvent]:
    """Yields prompts: 0.1 ms per token on the target, 0.02 ms on the draft."""
    now = 0
    for number, length in enumerate(lengths):
        name = f"prompt-{length}"
        yield VerifySent(now, name, number, number, 0, length, 0)
        yield DraftAsked(now, name, number, 0, length, 1, ())
        now += length * MS // 10
        yield DraftReplied(now, name, number, "proposal", length * MS // 50, 1, 0, False)
        yield VerdictReceived(now, name, number, length * MS // 10, "model", 0, 0, 1, "prefill")


def plain_prompts(*lengths: int) -> Samples:
    """Prompts of the target alone."""
    of_draft = (DraftAsked, DraftReplied)
    return read_samples([event for event in prompts(*lengths) if not isinstance(event, of_draft)])


def fitted(sweep: Sweep) -> TargetProfile:
    return fit_target(sweep, fake_info("target"), hardware="box")


@pytest.fixture
def sweep() -> Sweep:
    rounds = Samples()
    for count in (1, 2, 4):
        for k in (1, 3):
            rounds.extend(read_samples(list(serial_rounds(count, k, 5))))
    return Sweep(
        rounds=[rounds],
        prefills=read_samples(list(prompts(100, 200))),
        plain_prefills=plain_prompts(100, 200),
        acceptance={0.0: rounds},
        outputs={0.0: [output("101")]},
        hits={0.0: {1: (3, 4)}},
    )


def test_steps_hold_what_was_sent_together() -> None:
    samples = read_samples(list(serial_rounds(2, 3, 2)))
    assert [(step.num_sequences, step.num_rows, step.num_context_tokens) for step in samples.target] == [
        (2, 8, 20),
        (2, 8, 20),
    ]
    assert [step.forward_s for step in samples.target] == [0.008, 0.008]
    assert [step.gap_s for step in samples.target] == [None, pytest.approx(2e-4)]
    assert samples.target[1].transport_s == pytest.approx(5e-4)
    assert [(step.num_sequences, step.num_tokens, step.forward_s) for step in samples.draft] == [
        (2, 3, 0.006),
        (2, 3, 0.006),
    ]
    assert samples.draft[0].gap_s == pytest.approx(1e-4)
    assert samples.draft[0].transport_s == pytest.approx(2.5e-4)
    assert samples.rounds == [(3, 2)] * 4


def test_acceptance_of_a_tree_is_that_of_its_depths() -> None:
    """Nine nodes, of which four could have been accepted."""
    events = [
        VerifySent(0, "a", 1, 1, 10, 1, 9),
        VerdictReceived(9 * MS, "a", 1, 9 * MS, "model", 9, 2, 3, "fixed", depth=4),
    ]
    assert read_samples(events).rounds == [(4, 2)]


def test_step_without_all_its_verdicts_is_left_out() -> None:
    events = list(serial_rounds(2, 3, 1))
    del events[3]
    assert read_samples(events).target == []


def test_engines_at_the_same_time_are_marked() -> None:
    samples = read_samples(list(prompts(100)))
    # The target works for 10 ms and the draft for the last 2 of them.
    assert samples.target[0].beside_s == pytest.approx(0.002)
    assert samples.draft[0].beside_s == pytest.approx(0.002)
    assert not is_beside(samples.target[0])


def test_hits_are_counted_by_the_width_of_the_plan() -> None:
    def planned(width: int) -> Planned:
        return Planned(0, "a", "model", "enumerate", 2, width, "profitable", 1, 0.5, {})

    results = ("hit", "miss_token", "late_hit")
    looked = [LookedUp(0, "a", result, 2) for result in results]
    assert read_hits([looked[0], planned(1), looked[0], looked[1], planned(3), looked[2]]) == {
        1: (1, 2),
        3: (1, 1),
    }


def test_fitted_target_takes_what_the_steps_took(sweep: Sweep) -> None:
    target = fitted(sweep)
    assert {point.num_rows: point.seconds for point in target.verify} == pytest.approx(
        {rows: rows * 1e-3 for rows in (2, 4, 8, 16)}
    )
    assert target.per_sequence_s == 0.0
    assert target.transport.fixed_s == pytest.approx(5e-4)
    assert target.context == ()
    assert [(point.num_tokens, point.seconds) for point in target.prefill] == [(100, 0.01), (200, 0.02)]
    assert (target.hardware, target.max_num_seqs) == ("box", 64)


def test_fitted_draft_takes_what_the_steps_took(sweep: Sweep) -> None:
    draft = fit_draft(sweep, fake_info("draft"), hardware="box")
    assert {(point.num_sequences, point.num_tokens): point.seconds for point in draft.propose} == (
        pytest.approx({(count, k): 2e-3 * k for count in (1, 2, 4) for k in (1, 3)})
    )
    assert draft.transport.fixed_s == pytest.approx(2.5e-4)
    assert [(point.num_tokens, point.seconds) for point in draft.prefill] == [(100, 0.002), (200, 0.004)]


def test_fitted_router_takes_its_time_between_messages(sweep: Sweep) -> None:
    router = fit_router(sweep)
    assert router.verify_after_proposal.fixed_s == pytest.approx(2e-4)
    assert router.ask_after_verdict.fixed_s == pytest.approx(1e-4)
    assert router.verify_after_verdict == LinearTime()


def test_longer_contexts_cost_what_they_took_more(sweep: Sweep) -> None:
    def long(context_len: int, forward_ms: int) -> Samples:
        events: list[TraceEvent] = []
        for number in range(3):
            at = number * 100 * MS
            events.append(VerifySent(at, "long", number, number, context_len, 1, 1))
            done = at + forward_ms * MS
            events.append(
                VerdictReceived(done, "long", number, forward_ms * MS, "model", 1, 0, 1, "profitable")
            )
        return read_samples(events)

    sweep.long_context = {(1, n): long(n, ms) for n, ms in ((1000, 5), (500, 3), (2000, 4))}
    target = fitted(sweep)
    assert {point.rows_per_sequence for point in target.context} == {2}
    assert [(point.num_tokens, point.seconds) for point in target.context] == [
        (10, 0.0),
        (500, pytest.approx(1e-3)),
        (1000, pytest.approx(3e-3)),
        (2000, pytest.approx(3e-3)),
    ]


def test_rates_are_those_of_rounds_that_came_so_far() -> None:
    rounds = [(2, 0)] * 20 + [(2, 1)] * 10 + [(2, 2)] * 10
    assert rates_by_position(rounds) == (0.5, 0.5)


def test_position_that_few_rounds_reached_has_no_rate() -> None:
    assert rates_by_position([(2, 0)] * 20 + [(2, 2)] * 9) == (9 / 29,)


def test_acceptance_has_rates_and_hits(sweep: Sweep) -> None:
    (profile,) = fit_acceptance(sweep)
    assert profile.temperature == 0.0
    # K = 1 keeps none of one, K = 3 keeps two of three.
    assert profile.by_position == (0.5, 1.0, 0.0)
    assert [(hit.width, hit.rate, hit.num_lookups) for hit in profile.hit_rates] == [(1, 0.75, 4)]
    assert profile.outputs == (output("101"),)


def beside_draft(number: int, forward_ms: int) -> Iterator[TraceEvent]:
    """A step of 4 rows for two sessions, and outcomes that take the last 4 ms of it."""
    start, end = 100 * number * MS, (100 * number + forward_ms) * MS
    for name in ("a", "b"):
        yield VerifySent(start, name, number, number, 10, 1, 1)
        yield DraftAsked(start, name, number, 10, 1, 1, (1, 1))
    for name in ("a", "b"):
        yield DraftReplied(end, name, number, "outcomes", 4 * MS, 4, 2, False)
    for name in ("a", "b"):
        yield VerdictReceived(end, name, number, forward_ms * MS, "model", 1, 1, 2, "profitable")


def test_a_step_gets_on_slower_by_what_it_lost_beside_the_draft(sweep: Sweep) -> None:
    # 4 ms alone; 6 ms beside 4 ms of the draft, in which it got on by 2.
    sweep.overlapped = read_samples([event for number in range(3) for event in beside_draft(number, 6)])
    target = fitted(sweep)
    assert target.slowdown_beside_draft == pytest.approx(4 / 2)
    assert target.prompt_slowdown_beside_draft == 1.0


def test_a_prompt_waits_in_the_router_and_on_its_way(sweep: Sweep) -> None:
    # The router takes 0.4 ms before each but the first, the way 1.5 ms, of which others take 0.5.
    events: list[TraceEvent] = []
    for number in range(4):
        at = number * 20 * MS
        events += [
            VerifySent(at, f"p{number}", number, number, 0, 100, 0),
            VerdictReceived(at + 19_600_000, f"p{number}", number, 18_100_000, "model", 0, 0, 1, "prefill"),
        ]
    sweep.prefills = Samples()
    sweep.plain_prefills = read_samples(events)
    target = fitted(sweep)
    assert target.prompt_wait_s == pytest.approx(0.4e-3 + 1.5e-3 - 0.5e-3)


def target_steps(count: int, k: int, forward_ns: int) -> Iterator[TraceEvent]:
    """Yields three steps of ``count`` sessions without a draft."""
    for number in range(3):
        at = number * 100 * MS
        for index in range(count):
            yield VerifySent(at, f"{count}-{index}", number, number, 10, 1, k)
        for index in range(count):
            yield VerdictReceived(
                at + forward_ns, f"{count}-{index}", number, forward_ns, "model", k, k, k, "profitable"
            )


def test_step_that_took_longer_than_a_larger_one_shares_its_time_with_it(sweep: Sweep) -> None:
    sweep.rounds[0].extend(read_samples(list(target_steps(1, 5, 15 * MS))))
    target = fitted(sweep)
    # Three steps of 6 rows took 15 ms, ten of 8 rows 8 ms.
    seconds = {point.num_rows: point.seconds for point in target.verify}
    assert seconds[6] == seconds[8] == pytest.approx((3 * 15e-3 + 10 * 8e-3) / 13)
    assert seconds[4] == pytest.approx(4e-3) and seconds[16] == pytest.approx(16e-3)


def test_draft_beside_the_target_is_slower_by_what_it_lost(sweep: Sweep) -> None:
    # A proposal of one token takes 2 ms alone; here 3 ms, all of them beside the target.
    events: list[TraceEvent] = []
    for number in range(3):
        at = 100 * number * MS
        events += [
            VerifySent(at, "a", number, number, 10, 1, 0),
            DraftAsked(at, "b", number, 10, 1, 1, ()),
            DraftReplied(at + 3 * MS, "b", number, "proposal", 3 * MS, 1, 0, False),
            VerdictReceived(at + 9 * MS, "a", number, 9 * MS, "model", 0, 0, 1, "prefill"),
        ]
    sweep.overlapped = read_samples(events)
    draft = fit_draft(sweep, fake_info("draft"), hardware="box")
    assert draft.slowdown_beside_target == pytest.approx(3 / 2)


def test_single_steps_are_kept_as_quantiles_around_their_mean() -> None:
    # One step of four takes four times as long as the others.
    samples = Samples()
    for n in range(8):
        samples.extend(read_samples(list(target_steps(1, 3, (16 if n % 4 == 3 else 4) * MS))))
    target = fitted(Sweep(rounds=[samples], plain_prefills=plain_prompts(100)))
    assert len(target.step_spread) == 20
    assert sum(target.step_spread) / 20 == pytest.approx(1.0, abs=0.01)
    # A sample counts for at most three times the median.
    assert max(target.step_spread) == pytest.approx(3 * min(target.step_spread), rel=0.01)


def test_what_each_sequence_adds_is_told_apart_from_the_rows() -> None:
    rounds = Samples()
    for count, k in ((1, 7), (2, 3), (4, 1), (8, 0)):
        rounds.extend(read_samples(list(target_steps(count, k, 8 * MS + count * MS // 2))))
    target = fitted(Sweep(rounds=[rounds], plain_prefills=plain_prompts(100)))
    assert target.per_sequence_s == pytest.approx(5e-4)
    assert [(point.num_rows, point.seconds) for point in target.verify] == [(8, pytest.approx(8e-3))]


def test_the_median_of_the_passes_counts() -> None:
    passes = [read_samples(list(target_steps(1, 3, milliseconds * MS))) for milliseconds in (4, 9, 7)]
    target = fitted(Sweep(rounds=passes, plain_prefills=plain_prompts(100)))
    assert [(point.num_rows, point.seconds) for point in target.verify] == [(4, pytest.approx(7e-3))]
