"""What a draft's proposals take: steps, by the proposals that are still growing in each, and the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from specray.control.cost_model import DraftTimes

SHAPE = {1: 0.001, 9: 0.003}
"""A quarter of a millisecond for each further proposal."""
ENDING_EARLY = ([1, 1, 1, 1, 1, 1, 2, 8], [1, 1, 2, 3], [1] * 8, [1, 6], [5])


def seconds_of(num_steps: Sequence[int], *, factor: float, overhead_s: float) -> float:
    """Of proposals that take so many steps, where those that have ended take nothing."""
    lines = [sum(steps > index for steps in num_steps) for index in range(max(num_steps))]
    steps_s = sum(0.001 + 0.00025 * (count - 1) for count in lines)
    return factor * steps_s + overhead_s * math.sqrt(len(num_steps))


def learnt(*, factor: float, overhead_s: float, num_answers: int = 200) -> DraftTimes:
    draft = DraftTimes()
    draft.expect(SHAPE)
    for index in range(num_answers):
        num_steps = ENDING_EARLY[index % len(ENDING_EARLY)]
        draft.add(num_steps, seconds_of(num_steps, factor=factor, overhead_s=overhead_s))
    return draft


def test_steps_and_the_rest_are_told_apart_where_most_proposals_end_early() -> None:
    draft = learnt(factor=1.5, overhead_s=0.0004)
    assert draft.overhead_s(1) == pytest.approx(0.0004, rel=0.05)
    steps_s = [draft.step_s(count) for count in (1, 5, 9)]
    assert steps_s == pytest.approx([0.0015, 0.003, 0.0045], rel=0.01)


def test_a_draft_that_takes_what_it_says_of_itself_has_no_overhead() -> None:
    draft = learnt(factor=1.0, overhead_s=0.0)
    assert draft.overhead_s(1) == pytest.approx(0.0, abs=1e-9)
    assert draft.step_s(1) == pytest.approx(0.001)


def test_nothing_is_known_before_the_draft_says_or_does_something() -> None:
    draft = DraftTimes()
    assert draft.step_s(1) is None and draft.overhead_s(1) == 0.0
    draft.expect({})
    assert draft.step_s(1) is None


def test_overhead_is_never_below_nothing() -> None:
    """Proposals that share steps take less than was said of so many: it is the steps that are faster."""
    draft = learnt(factor=1.0, overhead_s=-0.0002)
    assert draft.overhead_s(1) == 0.0
    assert 0.0005 < (draft.step_s(1) or 0.0) < 0.001


def test_a_step_takes_a_tenth_of_what_was_said_of_it_at_least() -> None:
    """Proposals of eight steps take no longer than those of one: then it is not the steps that take long."""
    draft = DraftTimes()
    draft.expect({1: 0.001})
    for _ in range(100):
        for num_steps in (1, 8):
            draft.add([num_steps], 0.002)
    assert draft.step_s(1) == pytest.approx(0.0001)
    assert 0.001 < draft.overhead_s(1) < 0.002


def test_without_an_expectation_the_first_answer_is_the_shape() -> None:
    draft = DraftTimes()
    draft.add([4, 2], 0.008)
    # Four steps: one takes as long for two as for one.
    assert [draft.step_s(count) for count in (1, 2, 8)] == pytest.approx([0.002, 0.002, 0.002])
    assert draft.overhead_s(1) == pytest.approx(0.0, abs=1e-9)


def test_what_the_draft_says_later_replaces_the_shape_of_the_first_answer() -> None:
    draft = DraftTimes()
    draft.add([4, 2], 0.008)
    draft.expect(SHAPE)
    assert [draft.step_s(count) for count in (1, 9)] == pytest.approx([0.001, 0.003])


def test_one_answer_that_takes_a_hundred_times_as_long_counts_as_three_times() -> None:
    hiccup, slow = (learnt(factor=1.5, overhead_s=0.0004) for _ in range(2))
    believed_s = (hiccup.step_s(1) or 0.0) * 4 + hiccup.overhead_s(1)
    hiccup.add([4], 100 * believed_s)
    slow.add([4], 3 * believed_s)
    assert hiccup.step_s(1) == pytest.approx(slow.step_s(1))
    assert hiccup.overhead_s(1) == pytest.approx(slow.overhead_s(1))
    assert (hiccup.step_s(1) or 0.0) * 4 + hiccup.overhead_s(1) == pytest.approx(believed_s, rel=0.1)


def test_another_draft_is_believed_as_if_there_had_been_none() -> None:
    draft = DraftTimes()
    draft.expect({1: 0.001})
    for _ in range(50):
        draft.add([4], 0.020)
    draft.expect({1: 0.002})
    assert (draft.step_s(1), draft.overhead_s(1)) == (0.002, 0.0)
