"""Figures that were measured of a candidate, and the cost model that the service would make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean, median

from specray.bench.core.figures import Tally
from specray.control.cost_model import CostModel
from specray.engine_info import RoutedExperts, StepTime

_NUM_TRUSTED = 3
"""Samples from which on the time of steps of one size is trusted."""
_MAX_SURPRISE = 1.5
"""Longest sample that an average takes, as a multiple of the median."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a candidate's draft tokens fared with one K, at one temperature, on the prompts of one domain."""

    temperature: float
    domain: str
    k: int
    tokens_per_round: float
    """Output tokens per step of the target: tau. Rounds without draft tokens count too."""
    drafts_per_round: float
    """Draft tokens per step of the target; of a tree, all its nodes."""
    acceptance: float
    """Share of the places behind accepted draft tokens, and of first ones, at which one more was accepted."""
    by_depth: tuple[float, ...]
    """P(one more is accepted | so many were), from none on."""
    num_rounds: int

    @classmethod
    def of(cls, temperature: float, domain: str, k: int, tally: Tally) -> Likeness:
        """The figures of a tally with at least one round."""
        return cls(
            temperature,
            domain,
            k,
            tally.tokens_per_round,
            tally.num_drafts / tally.num_rounds,
            tally.acceptance,
            tally.by_depth,
            tally.num_rounds,
        )

    @property
    def survival(self) -> tuple[float, ...]:
        """P(at least so many draft tokens are accepted), from one on, of rounds with draft tokens."""
        return tuple(accumulate(self.by_depth, mul))

    def tau_with(self, rejections: float) -> float:
        """Tokens per round, if only a share of the rejections were left at each depth."""
        rates = self.by_depth
        if rates and rates[-1] == 0:
            # Nothing came further; what is accepted there, if something does, is not known better.
            rates += (self.acceptance,) * (self.k - len(rates))
        now, then = (
            1 + sum(accumulate((1 - share * (1 - rate) for rate in rates), mul))
            for share in (1.0, rejections)
        )
        # The rates by depth are of rounds with draft tokens; what such rounds commit beyond one token grows.
        grown = (then - 1) / (now - 1) if now > 1 else 1.0
        return 1 + (self.tokens_per_round - 1) * grown


@dataclass(frozen=True, slots=True)
class VerifyTime:
    """A target step without prompts, as the router sees it."""

    at_s: float
    """Time at which it was sent, on a clock that all steps share."""
    num_sequences: int
    num_rows: int
    num_context_tokens: int
    """Tokens that its sequences hold together, with its rows."""
    seconds: float
    num_experts: int | None = None
    """Distinct experts that its rows hit, in all layers; None: there are none, or they were not counted."""


@dataclass(frozen=True, slots=True)
class ProposeTime:
    """A draft step that answered proposals of chains."""

    at_s: float
    """Time of the answer, on the same clock."""
    num_sequences: int
    num_tokens: int
    """Draft tokens per proposal."""
    num_read: int
    """Tokens that all proposals began with together."""
    forward_s: float
    transport_s: float


@dataclass(frozen=True, slots=True)
class Times:
    """Both engines' steps with one candidate: what they say of themselves, and what service has shown."""

    most_sequences: int
    """Most sequences at a time with which steps were measured."""
    target_steps: tuple[StepTime, ...] = ()
    context_token_s: float = 0.0
    """Seconds per token that a step's sequences hold, as the target says."""
    experts: RoutedExperts | None = None
    """What the target says of its experts; None: it is no mixture."""
    draft_steps: tuple[StepTime, ...] = ()
    verify: tuple[VerifyTime, ...] = ()
    propose: tuple[ProposeTime, ...] = ()

    @property
    def has_draft_steps(self) -> bool:
        return bool(self.draft_steps or self.propose)

    def verify_s(self) -> dict[int, float]:
        """Measured seconds of a target step by its rows, ascending, of sizes that came often enough."""
        by_rows: dict[int, list[float]] = {}
        for one in self.verify:
            by_rows.setdefault(one.num_rows, []).append(one.seconds)
        return {rows: _usual(all_s) for rows, all_s in sorted(by_rows.items()) if len(all_s) >= _NUM_TRUSTED}

    def cost_model(self, *, draft_factor: float = 1.0) -> CostModel:
        """The cost model of a service that has seen these steps, at the load that the machine had on average.

        Args:
            draft_factor: of all seconds of the draft; 0: its steps take no time.
        """
        cost = CostModel()
        cost.expect_target(self.target_steps, 0.0, context_token_s=self.context_token_s, experts=self.experts)
        if self.has_draft_steps and draft_factor > 0:
            steps = [StepTime(one.num_rows, draft_factor * one.seconds) for one in self.draft_steps]
        else:
            # Seconds of a draft step that takes none; 0 would mean that it is unknown.
            steps = [StepTime(1, 1e-12)]
        cost.expect_draft(steps, median(one.transport_s for one in self.propose) if self.propose else 0.0)
        log_loads: list[float] = []
        steps_seen: list[VerifyTime | ProposeTime] = [*self.verify, *self.propose]
        for one in sorted(steps_seen, key=lambda each: each.at_s):
            if isinstance(one, VerifyTime):
                cost.target.add(
                    one.num_rows,
                    one.seconds,
                    num_sequences=one.num_sequences,
                    num_context_tokens=one.num_context_tokens,
                    num_experts=one.num_experts,
                )
                log_loads.append(math.log(cost.load_factor))
            else:
                cost.observe_proposals(
                    [one.num_tokens] * one.num_sequences,
                    draft_factor * one.forward_s,
                    one.transport_s,
                    num_read=one.num_read,
                )
        # The last steps say how busy the machine was at their moment, which is no property of the draft.
        load = math.exp(fmean(log_loads)) if log_loads else 1.0
        for table in (*cost.target.rounds.values(), cost.target.prompts):
            table.load_factor = load
        cost.target.load_factor = load
        return cost


def _usual(seconds: Sequence[float]) -> float:
    """Average of samples, of which those that something disturbed count only in part."""
    most = _MAX_SURPRISE * median(seconds)
    return fmean(min(one, most) for one in seconds)
