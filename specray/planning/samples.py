"""Reads a router's trace as samples: what each step held, and how long it took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from specray.planning.profile import (
    MeasuredOutput,
)
from specray.router.trace import (
    DraftAsked,
    DraftReplied,
    LookedUp,
    Planned,
    TraceEvent,
    VerdictReceived,
    VerifySent,
)
from specray.types import DraftKind

_PREFILL_ROWS = 64
"""New tokens above which an item is a prompt, also where base_len is not 0."""
HITS = ("hit", "late_hit")


@dataclass(slots=True)
class TargetSample:
    """One target step. Times in seconds on the router's clock."""

    sent_s: float
    num_sequences: int = 0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_context_tokens: int = 0
    """Tokens before the rows, of all sequences together."""
    first_reply_s: float | None = None
    forward_s: float = 0.0
    num_replies: int = 0
    num_experts: int | None = None
    """Distinct experts that its rows hit; None: there are none, or they were not counted."""
    gap_s: float | None = None
    """Seconds that the router took before the step, once it could be sent."""
    is_after_proposal: bool = False
    beside_s: float = 0.0
    """Seconds of ``forward_s`` in which the draft worked, too."""

    @property
    def is_complete(self) -> bool:
        return self.first_reply_s is not None and self.num_replies == self.num_sequences

    @property
    def transport_s(self) -> float:
        """Seconds from sending to receiving, less the engine's work."""
        assert self.first_reply_s is not None
        return max(0.0, self.first_reply_s - self.sent_s - self.forward_s)


@dataclass(slots=True)
class DraftSample:
    """One draft step that answered questions of one kind."""

    first_asked_s: float
    last_asked_s: float
    replied_s: float
    forward_s: float
    num_sequences: int
    num_tokens: int
    num_new_tokens: int
    """Tokens that came with the questions."""
    num_context_tokens: int
    num_branches: int
    """Number of branches; 0: proposals."""
    is_prefill: bool
    is_mixed: bool
    gap_s: float | None = None
    """Seconds between the verdict and the first question."""
    beside_s: float = 0.0
    """Seconds of ``forward_s`` in which the target worked, too."""

    @property
    def transport_s(self) -> float:
        return max(0.0, self.replied_s - self.last_asked_s - self.forward_s)


def is_beside(sample: TargetSample | DraftSample) -> bool:
    """True if the other engine worked, too, for a good part of the step."""
    return sample.beside_s > 0.25 * sample.forward_s


@dataclass(slots=True)
class Samples:
    """All samples of times and acceptance in a trace."""

    target: list[TargetSample] = field(default_factory=list)
    draft: list[DraftSample] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (draft tokens, accepted tokens) of the rounds that verified a draft model's tokens."""

    def extend(self, other: Samples) -> None:
        self.target += other.target
        self.draft += other.draft
        self.rounds += other.rounds


def read_samples(events: Sequence[TraceEvent]) -> Samples:
    """Combines the events of each step. Steps of which a part is missing are left out."""
    reader = _StepReader()
    for event in events:
        reader.take(event)
    reader.end()
    samples = reader.samples
    samples.target = [step for step in samples.target if step.is_complete]
    _mark_overlaps(samples)
    return samples


def read_hits(events: Sequence[TraceEvent]) -> dict[int, tuple[int, int]]:
    """Returns (hits, lookups) of enumerated outcomes, by the width of the session's plan at the time."""
    widths: dict[str, int] = {}
    hits: dict[int, tuple[int, int]] = {}
    for event in events:
        if isinstance(event, Planned) and event.source == DraftKind.MODEL.value:
            widths[event.request_id] = event.width
        elif isinstance(event, LookedUp) and (width := widths.get(event.request_id)) is not None:
            found, lookups = hits.get(width, (0, 0))
            hits[width] = (found + (event.result in HITS), lookups + 1)
    return hits


class _StepReader:
    def __init__(self) -> None:
        self.samples = Samples()
        self._steps: dict[int, TargetSample] = {}
        self._step_of: dict[tuple[str, int], int] = {}
        self._asked: dict[tuple[str, int], DraftAsked] = {}
        self._replies: list[tuple[DraftAsked, DraftReplied]] = []
        self._verdict_s: float | None = None
        self._proposal_s: float | None = None
        self._ask_gap_s: float | None = None
        self._has_asked = False
        """True if the session has asked the draft since the last verdict."""

    def take(self, event: TraceEvent) -> None:
        if not isinstance(event, (DraftReplied, LookedUp)):
            self._end_draft_step()
        match event:
            case VerifySent():
                self._on_sent(event)
            case VerdictReceived():
                self._on_verdict(event)
            case DraftAsked():
                self._on_asked(event)
            case DraftReplied():
                self._on_replied(event)
            case _:
                pass

    def end(self) -> None:
        self._end_draft_step()

    def _on_sent(self, event: VerifySent) -> None:
        now = event.ns / 1e9
        step = self._steps.get(event.step)
        if step is None:
            step = self._steps[event.step] = TargetSample(now)
            self.samples.target.append(step)
            step.is_after_proposal = self._proposal_s is not None
            since = self._proposal_s if step.is_after_proposal else self._verdict_s
            step.gap_s = None if since is None else now - since
        is_prompt = event.base_len == 0 or event.num_new_tokens > _PREFILL_ROWS
        # Accepted tokens are told again, and were computed as draft tokens.
        rows = event.num_draft_tokens + (event.num_new_tokens if is_prompt else 1)
        step.num_sequences += 1
        step.num_rows += rows
        step.num_context_tokens += event.base_len
        if is_prompt:
            step.num_prefill_rows += rows
        self._step_of[event.request_id, event.round_id] = event.step

    def _on_verdict(self, event: VerdictReceived) -> None:
        number = self._step_of.pop((event.request_id, event.round_id), None)
        if number is None:
            return
        now = event.ns / 1e9
        step = self._steps[number]
        if step.first_reply_s is None:
            step.first_reply_s = now
            step.forward_s = event.forward_ns / 1e9
            step.num_experts = event.num_experts
            self._verdict_s, self._proposal_s, self._has_asked = now, None, False
        step.num_replies += 1
        if event.num_draft_tokens and event.source == DraftKind.MODEL.value:
            most = event.num_draft_tokens if event.depth is None else event.depth
            self.samples.rounds.append((most, event.num_accepted_tokens))

    def _on_asked(self, event: DraftAsked) -> None:
        self._asked[event.request_id, event.round_id] = event
        if not event.fanout and self._verdict_s is not None and not self._has_asked:
            self._ask_gap_s = event.ns / 1e9 - self._verdict_s
            self._has_asked = True

    def _on_replied(self, event: DraftReplied) -> None:
        question = self._asked.pop((event.request_id, event.round_id), None)
        if self._replies and self._replies[-1][1].forward_ns != event.forward_ns:
            self._end_draft_step()
        if question is not None and event.kind in ("proposal", "outcomes"):
            self._replies.append((question, event))

    def _end_draft_step(self) -> None:
        if not self._replies:
            return
        questions = [question for question, _ in self._replies]
        first = self._replies[0][1]
        self.samples.draft.append(
            DraftSample(
                first_asked_s=min(question.ns for question in questions) / 1e9,
                last_asked_s=max(question.ns for question in questions) / 1e9,
                replied_s=first.ns / 1e9,
                forward_s=first.forward_ns / 1e9,
                num_sequences=len(questions),
                num_tokens=max(question.num_speculative_tokens for question in questions),
                num_new_tokens=sum(question.num_new_tokens for question in questions),
                num_context_tokens=sum(question.base_len for question in questions),
                num_branches=sum(event.num_branches for _, event in self._replies),
                is_prefill=any(
                    question.base_len == 0 or question.num_new_tokens > _PREFILL_ROWS
                    for question in questions
                ),
                is_mixed=len({bool(question.fanout) for question in questions}) > 1,
                gap_s=self._ask_gap_s,
            )
        )
        self._ask_gap_s = None
        if not questions[0].fanout:
            self._proposal_s = first.ns / 1e9
        self._replies = []


def _mark_overlaps(samples: Samples) -> None:
    drafts = [(step.replied_s - step.forward_s, step.replied_s) for step in samples.draft]
    targets = [
        (step.first_reply_s - step.forward_s, step.first_reply_s)
        for step in samples.target
        if step.first_reply_s is not None
    ]
    for span, target in zip(targets, samples.target, strict=True):
        target.beside_s = _shared_s(span, drafts)
    for span, draft in zip(drafts, samples.draft, strict=True):
        draft.beside_s = _shared_s(span, targets)


def _shared_s(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds that a span shares with others, which are one engine's and so do not overlap."""
    shared_s = 0.0
    for index in range(bisect_left(others, span[0], key=itemgetter(1)), len(others)):
        start, end = others[index]
        if start >= span[1]:
            break
        shared_s += min(span[1], end) - max(span[0], start)
    return shared_s


@dataclass(slots=True)
class Sweep:
    """Samples of a measurement, by the load that was served."""

    rounds: list[Samples] = field(default_factory=list)
    """Steps of many sizes with short contexts; one entry per pass."""
    prefills: Samples = field(default_factory=Samples)
    """Prompts of many lengths, one at a time, for both engines."""
    plain_prefills: Samples = field(default_factory=Samples)
    """Prompts of many lengths, one at a time, for the target alone."""
    long_context: dict[tuple[int, int], Samples] = field(default_factory=dict)
    """Loads of a few sessions, by K and prompt tokens."""
    overlapped: Samples = field(default_factory=Samples)
    """Draft and target at work at the same time."""
    acceptance: dict[float, Samples] = field(default_factory=dict)
    """Samples by temperature."""
    outputs: dict[float, list[MeasuredOutput]] = field(default_factory=dict)
    """Outputs by temperature, with what the draft would have proposed."""
    hits: dict[float, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """Counts (hits, lookups) by temperature and width."""
