"""Service times of simulated engines, from a profile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from specray.control.cost_model import num_draft_steps
from specray.control.experts import ExpertUse
from specray.planning.curves import Surface, interpolate
from specray.planning.profile import DraftProfile, EngineProfile, LinearTime, TargetProfile
from specray.types import MAX_SPECULATIVE_TOKENS, DraftReply, SpeculateItem


def drawn(rng: random.Random, spread: Sequence[float]) -> float:
    """Draws the time of one step, as a multiple of the average."""
    return rng.choice(spread) if spread else 1.0


@dataclass(slots=True)
class StepSize:
    """The rows of a target step."""

    prompts: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (tokens before, tokens) of each prompt or prefill chunk."""
    num_sequences: int = 0
    """Running sequences; all that follows is theirs."""
    num_rows: int = 0
    num_context_tokens: int = 0
    has_drafts: bool = False

    def add(self, base_len: int, num_new_tokens: int, num_drafts: int) -> None:
        """Adds one item: a prompt if it begins a sequence, or brings more tokens than a round does."""
        self.has_drafts = self.has_drafts or num_drafts > 0
        if base_len == 0 or num_new_tokens > 1 + MAX_SPECULATIVE_TOKENS:
            self.prompts.append((base_len, num_new_tokens + num_drafts))
        else:
            self.num_sequences += 1
            self.num_rows += num_new_tokens + num_drafts
            self.num_context_tokens += base_len


class SimulatedTargetTimes:
    """Step times of one target group."""

    def __init__(self, profile: TargetProfile) -> None:
        self._curve = [(point.num_rows, point.seconds) for point in profile.verify]
        self._profile = profile
        self._prompts = _prompt_curve(profile)
        self._context = _context_surface(profile)
        self._experts = ExpertUse() if profile.experts is None else profile.experts.use()
        self._least_s = min(self._curve[0][1], self._prompts[0][1])
        """Seconds of the smallest step, which reads the weights once."""
        self.transport = profile.transport
        self.plain_transport = profile.plain_transport or profile.transport
        self.step_spread = profile.step_spread
        self.transport_spread = profile.transport_spread
        self.prompt_wait_s = profile.prompt_wait_s
        self.slowdown = profile.slowdown_beside_draft
        self.prompt_slowdown = profile.prompt_slowdown_beside_draft

    def seconds(self, size: StepSize) -> float:
        """Returns the seconds of one step: its parts alone, less the weights that each would read."""
        parts = [self._prompt_s(base_len, num_tokens) for base_len, num_tokens in size.prompts]
        if size.num_sequences:
            parts.append(self._running_s(size))
        return sum(parts) - (len(parts) - 1) * self._least_s if parts else 0.0

    def num_experts(self, size: StepSize) -> int | None:
        """Returns the distinct experts that a step hits; None: there are none, or they are not counted."""
        if self._experts.info is None or size.prompts or not size.num_sequences:
            return None
        return round(self._experts.expected(size.num_rows, size.num_sequences))

    def _running_s(self, size: StepSize) -> float:
        count = size.num_sequences
        seconds = interpolate(self._curve, size.num_rows) + self._profile.per_sequence_s * count
        seconds *= self._experts.expected_factor(size.num_rows, count)
        # Rounded, so that the surface remembers them.
        rows, context = round(size.num_rows / count, 1), size.num_context_tokens // count
        return seconds + count * self._context(rows, context)

    def _prompt_s(self, base_len: int, num_tokens: int) -> float:
        if base_len == 0:
            return interpolate(self._prompts, num_tokens)
        behind = interpolate(self._prompts, base_len + num_tokens) - interpolate(self._prompts, base_len)
        return self._least_s + behind


class SimulatedDraftTimes:
    """Step times of one draft.

    Args:
        profile: the measured draft.
        network_s: additional round trip to the routers in seconds.
    """

    def __init__(self, profile: DraftProfile, *, network_s: float = 0.0) -> None:
        self._propose = Surface((one.num_tokens, one.num_sequences, one.seconds) for one in profile.propose)
        points = [(one.num_tokens, one.num_branches, one.seconds) for one in profile.outcomes]
        self._outcomes = Surface(points) if points else None
        self._prompts = _prompt_curve(profile)
        self._context = _context_surface(profile)
        self.step_spread = profile.step_spread
        self.transport_spread = profile.transport_spread
        self.slowdown = profile.slowdown_beside_target
        transport = profile.transport
        self.transport = LinearTime(fixed_s=transport.fixed_s + network_s, per_item_s=transport.per_item_s)

    def step_s(self, answers: Sequence[tuple[SpeculateItem, DraftReply]]) -> float:
        """Returns the seconds of one step that gives all answers."""
        seconds = 0.0
        lines: list[int] = []
        num_tokens = num_branches = 0
        for item, reply in answers:
            # Tokens above which a question brings a prompt; shorter ones are in the measured times of a
            # round.
            if item.base_len == 0 or len(item.token_ids) > 64:
                seconds += interpolate(self._prompts, len(item.token_ids))
            if not item.num_speculative_tokens:
                continue
            seconds += self._context(1, item.base_len)
            if item.fanout:
                num_tokens = max(num_tokens, item.num_speculative_tokens)
                num_branches += item.max_branches or sum(item.fanout)
            else:
                lines.append(num_draft_steps(item, reply))
        seconds += self._lines_s(lines)
        if num_branches:
            seconds += self._outcomes_s(num_tokens, num_branches)
        return seconds

    def _lines_s(self, lines: Sequence[int]) -> float:
        """Returns the seconds of proposals side by side; the longer ones go on alone."""
        seconds, done = 0.0, 0
        for length in sorted(set(lines)):
            num_open = sum(one >= length for one in lines)
            before = self._propose(done, num_open) if done else 0.0
            seconds += max(0.0, self._propose(length, num_open) - before)
            done = length
        return seconds

    def _outcomes_s(self, num_tokens: int, num_branches: int) -> float:
        if self._outcomes is not None:
            return self._outcomes(num_tokens, num_branches)
        # Not measured: a ranking, then branches like as many sequences.
        return self._propose(num_tokens, num_branches) + self._propose(1, 1)


def _prompt_curve(profile: EngineProfile) -> list[tuple[float, float]]:
    return [(point.num_tokens, point.seconds) for point in profile.prefill]


def _context_surface(profile: EngineProfile) -> Surface:
    """Returns the seconds per sequence by its rows and the tokens before them."""
    points = [(point.rows_per_sequence, point.num_tokens, point.seconds) for point in profile.context]
    return Surface(points or [(1, 0, 0.0)])
