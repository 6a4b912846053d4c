"""Whether the proposals of a plan are trees, and which nodes of one are worth their rows.

A tree costs rows of the target's step and of the draft's, and its other branches bring what its first chain
misses. What they bring is measured against that chain, in the same rounds (``TreeStats``), so it is compared
with nothing else: with E tokens per round of the chain, gain and growth of trees, a tree is expected to
commit 1 + gain (E - 1) tokens for growth times as many rows. Step times by rows say what these cost; they
rise as the batch grows, and so the chain is chosen again.

An overlap spends the draft's time on the outcomes of a round, which hides a long way to the draft and the
draft itself. Its plans keep their chains, unless a tree is set: then a proposal is one wherever it is asked
for, and what follows a prepared outcome is a chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from specray.config import SpeculationConfig
from specray.control.cost_model import CostModel
from specray.control.expectations import ExpectedRound, expected_tokens
from specray.control.goodput import HYSTERESIS, MAX_ACCEPTANCE, MAX_BOUND, GoodputModel
from specray.control.state import PRIOR_GAIN, PRIOR_GROWTH, Plan, Reason, SessionStats
from specray.draft_tokens import TreeBudget
from specray.types import DraftKind, Overlap

MAX_NODES: Final = 32
"""Most nodes of a tree that is chosen by measurement."""
MIN_CHANCE: Final = 0.02
"""Least ``TreeBudget.min_chance``: rows never cost nothing, whatever was measured."""
EXTRA_NODES: Final = (16, 12, 8, 4, 2)
"""Nodes besides the chain of a draft that takes no time."""
_SAMPLED: Final = (DraftKind.MODEL.value, DraftKind.FEATURES.value)
"""Sources that sample their tokens under rejection."""
PRIORS_BY_KIND: Final[Mapping[bool, tuple[float, float]]] = MappingProxyType(
    {True: (PRIOR_GAIN, PRIOR_GROWTH), False: (1.1, 2.0)}
)
"""Gain and growth before a tree was verified, for a draft model and for drafts without one."""


class TreeChoice:
    """Chooses between chain and tree for a plan. Keeps no state of its own.

    Args:
        source: what proposes; anything but a draft model takes no time.
    """

    def __init__(
        self, config: SpeculationConfig, goodput: GoodputModel, cost_model: CostModel, *, source: str
    ) -> None:
        self._is_off = config.tree == "off"
        self._fixed = config.tree_budget
        self._goodput = goodput
        self._cost = cost_model
        self._is_model = source == DraftKind.MODEL.value
        self._is_sampled = source in _SAMPLED

    def with_tree(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        """The session's next plan with a tree, where one is set or promises more than the plan's chain."""
        if plan.tree is not None:
            # It was chosen for an earlier plan, which is kept.
            plan = replace(plan, tree=None)
        if self._is_off or plan.is_off or (self._fixed is None and plan.overlap is not Overlap.SERIAL):
            return plan
        if self._is_sampled and not stats.draft_knows_acceptance:
            # Of what was sampled for rejection, a chain is verified.
            return plan
        if self._fixed is not None:
            widths = self._fixed.widths[: plan.num_speculative_tokens]
            return replace(plan, tree=TreeBudget.of_widths(widths) if widths else self._fixed)
        if self._cost.verify_s(num_running, num_running) is None:
            return plan
        tree, goodput = (self._of_model if self._is_model else self._of_others)(plan, stats, num_running)
        has_tree = stats.plan is not None and stats.plan.tree is not None
        least = self._goodput.goodput(plan, stats, num_running) * (1.0 if has_tree else HYSTERESIS)
        if tree is None or goodput <= least:
            return plan
        return replace(
            plan, tree=tree, reason=Reason.TREE if plan.reason is Reason.PROFITABLE else plan.reason
        )

    def _of_model(self, plan: Plan, stats: SessionStats, num_running: int) -> tuple[TreeBudget | None, float]:
        k = plan.num_speculative_tokens
        chain = self._goodput.expected_round(k, stats)
        growth = max(1.0, min(stats.tree.growth.value, MAX_NODES / chain.num_drafts))
        tokens = with_branches(chain.num_tokens, stats)
        tree = ExpectedRound(growth * chain.num_drafts, tokens, chain.continuation)
        goodput = self._goodput.serial_goodput(k, [tree], num_running, width=growth)
        worth = num_running * goodput * self._row_s(chain.num_drafts, growth, num_running)
        chance = round(min(MAX_BOUND, max(MIN_CHANCE, worth)), 3)
        return TreeBudget(MAX_NODES, min_chance=chance), goodput

    def _row_s(self, num_drafts: float, growth: float, num_running: int) -> float:
        """Seconds that a node besides the chain takes, on both engines, on average."""
        cost = self._cost
        num_more = max(1.0, num_drafts * (growth - 1))
        fewer, more = (
            cost.verify_s(
                round(num_running * (1 + num_drafts + others)),
                num_running,
                num_branches=num_running * others,
            )
            or 0.0
            for others in (0.0, num_more)
        )
        narrow, wide = (
            cost.draft_step_s(round(num_running * width), fewer)
            for width in (1.0, 1.0 + num_more / num_drafts)
        )
        draft_s = max(0.0, wide - narrow) * num_drafts
        return (max(0.0, more - fewer) + draft_s) / (num_running * num_more)

    def _of_others(
        self, plan: Plan, stats: SessionStats, num_running: int
    ) -> tuple[TreeBudget | None, float]:
        k = plan.num_speculative_tokens
        acceptance = min(stats.acceptance.value, MAX_ACCEPTANCE)
        chain = expected_tokens(acceptance, k)
        most = with_branches(chain, stats)
        best: tuple[TreeBudget | None, float] = (None, 0.0)
        for extra in EXTRA_NODES:
            num_nodes = k + extra
            # Four nodes bring half of what many bring, eight three quarters.
            tokens = most - (most - chain) * 0.5 ** (extra / 4)
            goodput = self._goodput.lone_goodput(num_nodes, tokens, num_running, num_branches=extra)
            if goodput > best[1]:
                best = TreeBudget(num_nodes), goodput
        return best


def with_branches(num_tokens: float, stats: SessionStats) -> float:
    """Expected tokens of a round with trees, of whose first chains alone it would commit ``num_tokens``."""
    return 1 + max(1.0, stats.tree.gain.value) * (num_tokens - 1)
