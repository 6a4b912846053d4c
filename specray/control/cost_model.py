"""Seconds of both engines' steps: measured, corrected for the machine's load, and predicted.

Target steps are tabled (``target_times``). Draft steps are predicted from their sizes::

    seconds = factor * sum over steps of shape(rows in it) + overhead * sqrt(proposals)

The shape is what the draft measured of itself at its start. Factor and overhead are fitted to what proposals
take here (recursive least squares with forgetting, of relative errors). The overhead is of beginning (caches
are cold then) and of what each proposal needs besides its steps. Answers to about as many proposals each do
not separate them; with the square root, the overhead of one proposal is credited neither to each of many
nor to all of them together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specray.control.estimators import Average, OutcomesTime, Rate, TimeTable
from specray.control.expectations import prior_hit_rate
from specray.control.target_times import TargetTimes
from specray.engine_info import RoutedExperts, StepTime
from specray.types import DraftReply, Proposal, SpeculateItem

PRIOR_DRAFT_SHARE = 0.15
"""Draft step as a share of a target step, before the draft's steps are known."""
_FADING = 0.97
"""Forgetting factor of the draft's fit, per answer; a hundred answers are some seconds."""
_PRIOR_WEIGHT = 0.1
"""Weight, in answers, of the fit's prior: factor 1 and overhead 0."""
_MIN_FACTOR = 0.1
_MAX_SURPRISE = 3.0
"""Longest answer that the fit takes, as a multiple of its prediction."""


class DraftTimes:
    """Seconds per draft step, and the overhead of proposals; see the module."""

    _factor: float
    _overhead: float
    """Overhead of one proposal, in steps of one proposal."""
    # Sums of products of both regressors and of the answer, which is one.
    _steps_steps: float
    _steps_rest: float
    _rest_rest: float
    _steps_answer: float
    _rest_answer: float

    def __init__(self) -> None:
        self._shape = TimeTable()
        self._forget()

    def expect(self, seconds_by_number: Mapping[int, float]) -> None:
        """Sets the seconds of a step by its proposals, as a draft says; forgets the fit to another draft."""
        self._shape.expect(seconds_by_number)
        self._forget()

    def step_s(self, num_proposals: int) -> float | None:
        """Seconds of a draft step over ``num_proposals``; None: nothing is known."""
        shape = self._shape.predict(max(1, num_proposals))
        return None if shape is None else self._factor * shape

    def unread_s(self, num_proposals: int, num_tokens: float) -> float:
        """Extra seconds of the first step for reading ``num_tokens`` of each proposal instead of one."""
        first, read = self.step_s(num_proposals), self.step_s(first_rows(num_proposals, num_tokens))
        return 0.0 if first is None or read is None else max(0.0, read - first)

    def overhead_s(self, num_proposals: int) -> float:
        """Seconds of ``num_proposals`` besides their steps."""
        return self._overhead * math.sqrt(num_proposals) * (self._shape.predict(1) or 0.0)

    def add(
        self,
        num_steps: Sequence[int],
        seconds: float,
        *,
        num_read: int = 0,
        num_more_rows: Sequence[int] = (),
    ) -> None:
        """Takes the time of an answer to proposals, and to nothing else.

        Args:
            num_steps: of each proposal; at least one has some.
            seconds: more than 0.
            num_read: tokens that all proposals began with together; 0: one each.
            num_more_rows: of each step, rows beyond one for each proposal that grows: those of trees.
        """
        most = max(num_steps)
        if self._shape.predict(1) is None:
            # As good as any: all that is known.
            self.expect({1: seconds / most})
        unit = self._shape.predict(1) or 0.0
        rows = [sum(steps > index for steps in num_steps) for index in range(most)]
        for index, more in enumerate(num_more_rows):
            rows[index] += more
        rows[0] = max(rows[0], first_rows(len(num_steps), num_read / len(num_steps)))
        steps_s = sum(self._shape.predict(count) or 0.0 for count in rows)
        rest_s = unit * math.sqrt(len(num_steps))
        predicted_s = self._factor * steps_s + self._overhead * rest_s
        seconds = min(seconds, _MAX_SURPRISE * predicted_s) if predicted_s > 0 else seconds
        if seconds <= 0 or unit <= 0:
            return
        steps, rest = steps_s / seconds, rest_s / seconds
        self._steps_steps = _FADING * self._steps_steps + steps * steps
        self._steps_rest = _FADING * self._steps_rest + steps * rest
        self._rest_rest = _FADING * self._rest_rest + rest * rest
        self._steps_answer = _FADING * self._steps_answer + steps
        self._rest_answer = _FADING * self._rest_answer + rest
        self._fit()

    def _forget(self) -> None:
        self._factor, self._overhead = 1.0, 0.0
        self._steps_steps = self._steps_rest = self._rest_rest = 0.0
        self._steps_answer = self._rest_answer = 0.0

    def _fit(self) -> None:
        first, second = self._steps_steps + _PRIOR_WEIGHT, self._rest_rest + _PRIOR_WEIGHT
        mixed, answer = self._steps_rest, self._steps_answer + _PRIOR_WEIGHT
        determinant = first * second - mixed * mixed
        overhead = (first * self._rest_answer - mixed * answer) / determinant
        factor = (second * answer - mixed * self._rest_answer) / determinant
        if overhead < 0:
            overhead, factor = 0.0, answer / first
        elif factor < _MIN_FACTOR:
            factor = _MIN_FACTOR
            overhead = max(0.0, (self._rest_answer - mixed * factor) / second)
        self._factor, self._overhead = factor, overhead


@dataclass(slots=True)
class CostModel:
    """Everything measured of both engines, and the seconds predicted from it."""

    target: TargetTimes = field(default_factory=TargetTimes)
    draft: DraftTimes = field(default_factory=DraftTimes)
    """Times of proposals."""
    outcomes: OutcomesTime = field(default_factory=OutcomesTime)
    slowest_outcomes_s: float = 0.0
    """Longest recent draft step for outcomes, in seconds; it fades."""
    draft_round_trip: Average = field(default_factory=Average)
    """Seconds to the draft and back, at a load factor of 1."""
    hit_rate: dict[int, Rate] = field(default_factory=dict)
    """P(a verdict is among the outcomes) under enumeration, by width."""

    # Measurements

    def expect_target(
        self,
        step_times: Sequence[StepTime],
        round_trip_s: float,
        *,
        context_token_s: float = 0.0,
        context_row_share: float = 0.0,
        experts: RoutedExperts | None = None,
    ) -> None:
        """Sets the expected times of a target that was not measured here yet.

        Args:
            step_times: what the engine says of itself; may be empty.
            round_trip_s: of a message to it.
            context_token_s, context_row_share, experts: as the engine says.
        """
        target = self.target
        target.context_token_s = max(0.0, context_token_s) if math.isfinite(context_token_s) else 0.0
        target.context_row_share = context_row_share if 0.0 <= context_row_share <= 1.0 else 0.0
        if experts is not None and step_times:
            # Of a step and the way to the target, which are tabled together.
            step_s = step_times[0].seconds
            experts = replace(experts, share=experts.share * step_s / (step_s + round_trip_s))
        target.expect_experts(experts)
        seconds = {entry.num_rows: entry.seconds + round_trip_s for entry in step_times}
        target.prompts.expect(seconds)
        for entry in step_times:
            seconds[entry.num_rows] /= target.experts.factor(entry.num_experts)
        for times in target.rounds.values():
            times.expect(seconds)

    def expect_draft(self, step_times: Sequence[StepTime], round_trip_s: float) -> None:
        """Sets the expected times of a draft; as ``expect_target``."""
        pairs = [(entry.num_rows, entry.seconds) for entry in step_times]
        self.draft.expect(dict(pairs))
        self.outcomes.expect(pairs)
        self.draft_round_trip.expect(round_trip_s)

    def observe_draft_step(
        self, answered: Sequence[tuple[SpeculateItem, DraftReply]], forward_s: float, transport_s: float
    ) -> None:
        """Takes a draft step that answered items of one kind; ignores mixed steps and prefills.

        Args:
            answered: what was asked, and proposals or outcomes.
            transport_s: from the first question to the answers, less ``forward_s``.
        """
        items = [item for item, _ in answered]
        kinds = {bool(item.fanout) for item in items}
        # More than 64 new tokens are a prefill.
        if len(kinds) != 1 or any(item.is_prefill_chunk or len(item.token_ids) > 64 for item in items):
            return
        num_steps = [num_draft_steps(*answer) for answer in answered]
        if not items[0].fanout:
            num_read = sum(len(item.token_ids) for item in items)
            self.observe_proposals(
                num_steps, forward_s, transport_s, num_read=num_read, num_more_rows=_more_rows(answered)
            )
            return
        num_branches = sum(item.max_branches or sum(item.fanout) for item in items)
        self.observe_outcomes(max(num_steps), num_branches, forward_s)

    def observe_proposals(
        self,
        num_steps: Sequence[int],
        forward_s: float,
        round_trip_s: float,
        *,
        num_read: int = 0,
        num_more_rows: Sequence[int] = (),
    ) -> None:
        """Takes a draft step that answered proposals and nothing else; as ``DraftTimes.add``."""
        if max(num_steps) > 0:
            seconds = forward_s / self.load_factor
            self.draft.add(num_steps, seconds, num_read=num_read, num_more_rows=num_more_rows)
            self.draft_round_trip.add(max(0.0, round_trip_s) / self.load_factor)

    def observe_outcomes(self, num_tokens: int, num_branches: int, forward_s: float) -> None:
        """Takes a draft step that answered outcomes, with branches of ``num_tokens``, and nothing else."""
        if self.draft.step_s(1) is None:
            # No proposal was asked for yet: infer a step from the branches' expected cost.
            step_s = forward_s / OutcomesTime().predict(num_tokens, num_branches, step_s=1.0)
            self.draft.add([1], step_s / self.load_factor)
        step_s = self.draft_step_s(1, 0.0)
        self.outcomes.add(num_tokens, num_branches, forward_s, step_s=step_s)
        self.slowest_outcomes_s = max(forward_s, 0.98 * self.slowest_outcomes_s)

    def observe_lookup(self, width: int, acceptance: float, *, is_hit: bool) -> None:
        """Takes whether a verdict was among the outcomes of an enumeration.

        Args:
            acceptance: per token, from which the first estimate follows.
        """
        if width not in self.hit_rate:
            self.hit_rate[width] = Rate(prior_hit_rate(width, acceptance))
        self.hit_rate[width].add(int(is_hit), 1)

    def decay(self, share: float) -> None:
        """Forgets a share of what was measured of outcomes, which may not have been asked for since."""
        self.outcomes.decay(share)
        for rate in self.hit_rate.values():
            rate.decay(share)

    # Predictions

    def verify_s(
        self, num_rows: int, num_sequences: int, *, num_branches: float = 0.0, is_overlapped: bool = False
    ) -> float | None:
        """Seconds of a target step; None: nothing is known.

        Args:
            num_branches: rows of trees besides their first chains.
        """
        return self.target.predict(
            num_rows, num_sequences, num_branches=num_branches, is_overlapped=is_overlapped
        )

    def usual_verify_s(self, num_rows: int, num_sequences: int) -> float | None:
        """Seconds of a target step, next to a working draft if one was measured; None: nothing is known."""
        return self.verify_s(num_rows, num_sequences, is_overlapped=bool(self.target.rounds[True]))

    def draft_step_s(self, num_sequences: int, verify_s: float) -> float:
        """Seconds per draft token of ``num_sequences`` side by side; a share of ``verify_s`` until known."""
        known = self.draft.step_s(num_sequences)
        return PRIOR_DRAFT_SHARE * verify_s if known is None else self.load_factor * known

    @property
    def round_trip_s(self) -> float:
        """Seconds to the draft and back; 0 while unknown."""
        return self.load_factor * (self.draft_round_trip.value or 0.0)

    @property
    def load_factor(self) -> float:
        """The target's, applied to the draft too: where engines share a machine, what slows one slows both,
        and the draft was measured at other moments."""
        return self.target.load_factor


def first_rows(num_proposals: int, num_tokens: float) -> int:
    """Equivalent rows of a first draft step in which each proposal reads ``num_tokens``."""
    # A further row shares the context of its proposal's first.
    return round(num_proposals * (1 + 0.5 * max(0.0, num_tokens - 1)))


def num_draft_steps(item: SpeculateItem, reply: DraftReply) -> int:
    """Draft steps of an answer: the token before which a proposal was ended had been drafted too."""
    asked = item.num_speculative_tokens
    if not isinstance(reply, Proposal):
        return asked
    if item.tree is not None and item.tree.widths:
        return min(asked, len(item.tree.widths))
    return min(asked, reply.draft.depth + 1)


def _more_rows(answered: Sequence[tuple[SpeculateItem, DraftReply]]) -> list[int]:
    """Rows of each draft step beyond one for each proposal: a step continues the nodes of one depth."""
    more: Counter[int] = Counter()
    for item, reply in answered:
        if not isinstance(reply, Proposal) or reply.draft.is_chain:
            continue
        num_steps = num_draft_steps(item, reply)
        for depth, count in Counter(reply.draft.depths).items():
            if depth + 1 < num_steps:
                more[depth + 1] += count - 1
    return [more[index] for index in range(max(more, default=-1) + 1)]
