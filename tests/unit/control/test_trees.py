"""Chain or tree: what is compared, what bounds a tree's nodes, and what is learnt from its verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel, num_draft_steps
from specray.control.draft_length import DraftLength
from specray.control.state import Plan, Reason, SessionStats, TreeVerdict
from specray.control.trees import MAX_NODES, MIN_CHANCE, TreeChoice, with_branches
from specray.draft_tokens import DraftTokens, TreeBudget
from specray.requests import SpeculationParams
from specray.types import Overlap, Proposal, SpeculateItem, Verification
from tests.unit.control.harness import chosen, goodput_of, measured, times
from tests.unit.router.harness import request, speculation_config


def seen(
    *, rows_s: float = 0.0, wide_s: float = 0.0, tree: str = "auto", **config: object
) -> tuple[Controller, SessionStats]:
    """A pair whose target's step takes 20 ms and ``rows_s`` per row, its draft's 2 ms and ``wide_s``."""
    controller = Controller(speculation_config(overlap="serial", tree=tree, **config))
    sizes = (1, 2, 4, 8, 16, 32, 64, 256)
    controller.cost_model.expect_target(times(*((rows, 0.020 + rows_s * rows) for rows in sizes)), 0.0)
    controller.cost_model.expect_draft(times(*((rows, 0.002 + wide_s * rows) for rows in sizes)), 0.0)
    return controller, controller.start_session(request())


def test_trees_are_off_by_default() -> None:
    assert speculation_config().tree == "off"
    controller, stats = seen(tree="off")
    assert chosen(controller, stats).tree is None


def test_free_rows_make_a_tree_of_all_nodes_that_are_ever_reached() -> None:
    controller, stats = seen()
    plan = chosen(controller, stats)
    assert plan.tree == TreeBudget(MAX_NODES, min_chance=MIN_CHANCE)
    assert plan.reason is Reason.TREE
    assert plan.num_tree_nodes == MAX_NODES


def test_dear_rows_leave_a_chain() -> None:
    controller, stats = seen(rows_s=0.004)
    plan = chosen(controller, stats)
    assert not plan.is_off and plan.tree is None and plan.reason is Reason.PROFITABLE
    # So do rows of the draft.
    controller, stats = seen(wide_s=0.004)
    assert chosen(controller, stats).tree is None


def test_bound_of_a_node_is_what_its_row_costs() -> None:
    bounds = []
    for rows_s in (0.0, 0.0002, 0.0003, 0.0004):
        controller, stats = seen(rows_s=rows_s)
        tree = chosen(controller, stats).tree
        assert tree is not None
        bounds.append(tree.min_chance)
    # At g tokens per second, a row that takes t seconds must bring g t tokens: here some 120 t, and never
    # less than a fiftieth.
    assert bounds == [0.02, 0.025, 0.036, 0.046]


def test_many_sessions_fall_back_to_the_chain() -> None:
    controller, stats = seen(rows_s=0.0002)
    assert chosen(controller, stats).tree is not None
    controller, stats = seen(rows_s=0.0002)
    plan = chosen(controller, stats, num_running=32)
    assert plan.tree is None


@pytest.mark.parametrize("overlap", [Overlap.AHEAD, Overlap.ENUMERATE])
def test_overlap_keeps_its_chains_unless_a_tree_is_set(overlap: Overlap) -> None:
    controller, stats = measured(overlap=overlap.value, tree="auto")
    plan = chosen(controller, stats)
    assert not plan.is_off and plan.overlap is overlap and plan.tree is None
    controller, stats = measured(overlap=overlap.value, tree="4x2")
    plan = chosen(controller, stats)
    assert plan.overlap is overlap and plan.tree == TreeBudget(12, (4, 2))


def test_rejection_keeps_its_chains() -> None:
    controller, _ = seen()
    given = request(temperature=1.0, verification=Verification.REJECTION)
    plan = chosen(controller, controller.start_session(given))
    assert not plan.is_off and plan.tree is None
    controller, _ = seen(tree="3x3")
    assert chosen(controller, controller.start_session(given)).tree is None


def test_unmeasured_target_gets_chains_but_what_is_set_holds() -> None:
    for tree, expected in (("auto", None), ("3x3", TreeBudget(12, (3, 3))), ("16", TreeBudget(16))):
        controller = Controller(speculation_config(overlap="serial", tree=tree))
        plan = chosen(controller, controller.start_session(request()))
        assert plan.reason is Reason.UNMEASURED and plan.tree == expected


def test_shape_is_cut_to_k() -> None:
    controller, stats = seen(tree="4x2x1", num_speculative_tokens=2)
    assert chosen(controller, stats).tree == TreeBudget(12, (4, 2))
    controller, stats = seen(tree="4x2x1", num_speculative_tokens=5)
    plan = chosen(controller, stats)
    assert (plan.tree, plan.reason) == (TreeBudget(20, (4, 2, 1)), Reason.FIXED)
    off = request(speculation=SpeculationParams(enabled=False))
    assert chosen(controller, controller.start_session(off)).tree is None


def test_gain_is_what_trees_bring_beside_their_first_chains() -> None:
    controller, stats = seen()
    for _ in range(200):
        controller.observe_tree(stats, TreeVerdict(12, 3, 4, 2))
    assert stats.tree.gain.value == pytest.approx(1.5, abs=0.03)
    assert stats.tree.growth.value == pytest.approx(3.0, abs=0.01)
    assert with_branches(3.0, stats) == pytest.approx(4.0, abs=0.06)
    # New sessions begin with what was measured of others.
    assert controller.start_session(request()).tree.gain.value == pytest.approx(1.5, abs=0.05)


def test_tree_that_brings_nothing_is_left_and_later_tried_again() -> None:
    controller, stats = seen(rows_s=0.0004)
    assert chosen(controller, stats).tree is not None
    for _ in range(200):
        controller.observe_tree(stats, TreeVerdict(12, 2, 4, 2))
        controller.observe_round(stats, 4, 2)
    assert chosen(controller, stats).tree is None
    for _ in range(2000):
        controller.observe_round(stats, 4, 2)
        chosen(controller, stats)
        if stats.plan is not None and stats.plan.tree is not None:
            break
    else:
        # What the service remembers of trees is the prior to which the session returns.
        assert stats.tree.gain.value < 1.3


def test_tree_is_kept_until_its_chain_is_better() -> None:
    """Between both bounds, whoever has a tree keeps it, and whoever has none gets none."""
    plan, options = Plan(4), {"tree": "auto", "num_speculative_tokens": 4}
    found = []
    for rows_s in [0.00002 * step for step in range(200)]:
        controller, stats = seen(rows_s=rows_s, **options)
        goodput = goodput_of(controller, **options)
        speculation = speculation_config(overlap="serial", **options)
        choice = TreeChoice(speculation, goodput, controller.cost_model, source="model")
        stats.plan = plan
        new = choice.with_tree(plan, stats, 1).tree is not None
        stats.plan = replace(plan, tree=TreeBudget(8))
        kept = choice.with_tree(plan, stats, 1).tree is not None
        found.append((new, kept))
    assert found[0] == (True, True) and found[-1] == (False, False)
    assert (False, True) in found and (True, False) not in found


@pytest.mark.parametrize("source", ["ngram", "suffix"])
def test_drafts_without_a_model_take_nodes_as_long_as_rows_are_free(source: str) -> None:
    target = seen()[0].cost_model.target
    config = speculation_config(overlap="serial", tree="auto")
    free = DraftLength(config, source, CostModel(target=target), prior_acceptance=0.7)
    stats = free.start_session(request())
    plan = free.plan(stats, num_remaining=100, num_running=1)
    assert plan.num_tree_nodes == plan.num_speculative_tokens + 16
    slow = CostModel(target=seen(rows_s=0.002)[0].cost_model.target)
    dear = DraftLength(config, source, slow, prior_acceptance=0.7)
    stats = dear.start_session(request())
    plan = dear.plan(stats, num_remaining=100, num_running=1)
    assert plan.num_speculative_tokens > 0 and plan.tree is None


# Seconds of draft steps


def test_steps_of_a_tree_are_those_of_its_longest_path() -> None:
    tree = DraftTokens((1, 2, 3, 4, 5), (-1, -1, 0, 1, 2))
    asked = SpeculateItem("a", 1, 0, (1,), 6, tree=TreeBudget(8))
    # Depths 0 to 2, and the step before which it ended.
    assert num_draft_steps(asked, Proposal("a", 1, 0, tree)) == 4
    assert num_draft_steps(replace(asked, num_speculative_tokens=3), Proposal("a", 1, 0, tree)) == 3
    shaped = replace(asked, tree=TreeBudget.of_widths((2, 1, 1)))
    assert num_draft_steps(shaped, Proposal("a", 1, 0, tree)) == 3
    assert num_draft_steps(asked, Proposal("a", 1, 0)) == 1
    assert num_draft_steps(asked, Proposal("a", 1, 0, DraftTokens((1, 2)))) == 3


def test_rows_of_a_tree_are_no_overhead_of_the_draft() -> None:
    def fitted(*, is_tree: bool) -> float:
        model = CostModel()
        model.expect_draft(times((1, 0.002), (16, 0.017)), 0.0)
        tree = DraftTokens(tuple(range(12)), (*[-1] * 4, *range(4), *range(4, 8)))
        asked = SpeculateItem("a", 1, 0, (1,), 3, tree=TreeBudget.of_widths((4, 1, 1)) if is_tree else None)
        reply = Proposal("a", 1, 0, tree if is_tree else DraftTokens((1, 2, 3)))
        for _ in range(100):
            # One row, then two steps of four rows each; or three of one.
            model.observe_draft_step([(asked, reply)], 0.012 if is_tree else 0.006, 0.0)
        return model.draft_step_s(1, 0.0)

    assert fitted(is_tree=False) == pytest.approx(0.002, rel=0.02)
    assert fitted(is_tree=True) == pytest.approx(0.002, rel=0.02)
