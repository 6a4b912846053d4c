"""Fan-out and overlap: what is foreseen of a round, and when it hides what the draft takes."""

from __future__ import annotations

import pytest

from specray.control.controller import Controller
from specray.control.expectations import prior_hit_rate
from specray.control.goodput import max_branches
from specray.control.state import OFF, Plan
from specray.types import Overlap
from tests.unit.control.harness import chosen, measured, worked
from tests.unit.router.harness import request, speculation_config

# Fan-out


def test_fanout_of_each_mode() -> None:
    controller, _ = measured(acceptance=0.58)
    for plan, fanout, most in (
        (Plan(3, Overlap.SERIAL), (), 0),
        (Plan(3, Overlap.AHEAD), (0, 0, 0, 1), 0),
        (Plan(3, Overlap.ENUMERATE, 3), (8, 8, 8, 8), 12),
        (Plan(3, Overlap.ENUMERATE, 1), (8, 8, 8, 8), 4),
        (OFF, (), 0),
    ):
        assert controller.fanout(plan, 3) == fanout
        assert max_branches(plan, 3, num_running=1) == most


def test_fanout_of_a_tree_has_its_other_nodes_behind_its_first_chain() -> None:
    controller, _ = measured()
    assert controller.fanout(Plan(3, Overlap.ENUMERATE, 3), 3, 5) == (8,) * 9
    assert controller.fanout(Plan(3, Overlap.AHEAD), 3, 5) == (0, 0, 0, 1)
    assert controller.fanout(Plan(3, Overlap.SERIAL), 3, 5) == ()


def test_fanout_of_a_round_without_draft_tokens_foresees_the_next_token() -> None:
    controller, _ = measured()
    assert controller.fanout(Plan(3, Overlap.AHEAD), 0) == (1,)
    plan = Plan(3, Overlap.ENUMERATE, 3)
    assert (controller.fanout(plan, 0), max_branches(plan, 0, num_running=1)) == ((8,), 3)


def test_long_fallback_gets_no_more_branches_than_the_drafts_own_proposals() -> None:
    numbers = [
        max_branches(Plan(3, Overlap.ENUMERATE, 2), count, num_running=1) for count in (0, 2, 3, 4, 16)
    ]
    assert numbers == [2, 6, 8, 8, 8]


def test_branches_get_fewer_as_load_grows() -> None:
    plan = Plan(3, Overlap.ENUMERATE, 3)
    numbers = [max_branches(plan, 3, num_running=count) for count in (1, 8, 12, 64, 200)]
    assert numbers == [12, 12, 8, 1, 1]


# Auto


def test_enumeration_is_chosen_where_it_hides_the_draft() -> None:
    controller, stats = measured(overlap="auto", draft_step_s=0.002, hits=0.9)
    assert worked(controller, stats) is Overlap.ENUMERATE


def test_overlap_is_not_chosen_where_it_slows_the_target_more_than_it_hides() -> None:
    controller, stats = measured(overlap="auto", draft_step_s=0.002)
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(60):
            controller.cost_model.target.add(rows, 0.035, is_overlapped=True)
    assert worked(controller, stats) is Overlap.SERIAL


def test_overlap_that_was_never_tried_must_promise_to_hide_more_than_a_little() -> None:
    chosen_ways = []
    for draft_step_s in (0.0003, 0.002):
        controller = Controller(speculation_config(overlap="auto", num_speculative_tokens=4))
        stats = controller.start_session(request())
        for rows in (1, 4, 5, 8):
            controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
        for _ in range(10):
            controller.cost_model.observe_proposals([4], 4 * draft_step_s, 0.0005)
        chosen_ways.append(worked(controller, stats))
    assert chosen_ways == [Overlap.SERIAL, Overlap.ENUMERATE]


def test_a_wider_fanout_is_chosen_while_it_still_hides_behind_the_target() -> None:
    chosen_widths = {}
    for draft_step_s in (0.001, 0.0028, 0.0033):
        controller, stats = measured(draft_step_s=draft_step_s, overlap="enumerate", num_speculative_tokens=4)
        for width, hits in ((1, 55), (2, 75), (3, 84)):
            for index in range(400):
                is_hit = index * 37 % 100 < hits
                controller.observe_lookup(Plan(4, Overlap.ENUMERATE, width), is_hit=is_hit)
        chosen_widths[draft_step_s] = chosen(controller, stats).width
    assert chosen_widths == {0.001: 3, 0.0028: 2, 0.0033: 1}


def test_hits_before_any_lookup_are_those_of_a_trained_pair() -> None:
    assert [prior_hit_rate(width, 0.55) for width in (1, 2, 3)] == pytest.approx([0.55, 0.775, 0.865])
