"""Turns a router's trace into spans of work: which engine computed what, when, and whether it was used."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specray.bench.overlap.run import HITS
from specray.router.trace import (
    Decided,
    DraftAsked,
    DraftReplied,
    ExperimentEnded,
    LookedUp,
    Planned,
    TraceEvent,
    VerdictReceived,
    VerifySent,
)

Interval = tuple[int, int]


class Lane(enum.StrEnum):
    DRAFT = "draft"
    TARGET = "target"


class Kind(enum.StrEnum):
    PREFILL = "prefill"
    PROPOSAL = "proposal"
    USED = "enumeration, used"
    WASTED = "enumeration, wasted"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class ItemSpan:
    """One item of one session, from the router to an engine and back. Times in ns on the router's clock."""

    request_id: str
    round_id: int
    lane: Lane
    kind: Kind
    asked_ns: int
    start_ns: int
    """Start of the engine's step, which other sessions may share."""
    end_ns: int
    replied_ns: int
    num_draft_tokens: int
    """Draft tokens that were drafted or verified."""
    num_branches: int = 0
    num_accepted_tokens: int | None = None
    """Accepted draft tokens of a verify; None: the span is no verify."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A verdict was looked up in the outcomes; ``result`` as in ``specray_outcomes_total``."""

    request_id: str
    ns: int
    result: str

    @property
    def is_hit(self) -> bool:
        return self.result in HITS


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans, marks and decisions of a trace, by time. Items without answer are left out."""

    spans: tuple[ItemSpan, ...]
    marks: tuple[Mark, ...]
    plans: tuple[Planned, ...]
    decisions: tuple[Decided | ExperimentEnded, ...] = ()
    """Decisions for all sessions and ends of experiments, in the order of the trace."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(span.request_id for span in self.spans))

    @property
    def start_ns(self) -> int:
        """Time at which the first item was sent; 0 for an empty timeline."""
        return min((span.asked_ns for span in self.spans), default=0)

    @property
    def end_ns(self) -> int:
        """Time at which the last answer came; 0 for an empty timeline."""
        return max((span.replied_ns for span in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares of the time in which any session ran, in [0, 1]."""

    active_ns: int
    target_idle: float
    draft_busy: float
    both_busy: float
    num_rounds: int
    """Verdicts that committed tokens."""
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    lookups: Mapping[str, int]
    """Verdicts by the result of their look-up."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Verdicts that committed tokens, by the reason of their round's plan."""
    first_token_s: float | None = None
    """Mean seconds from a session's first Verify to its first verdict with tokens; None: none was seen."""
    later_tokens_per_s: float | None = None
    """Tokens per second of one session after its first verdict with tokens: decoding without the prompt."""

    @property
    def hit_rate(self) -> float | None:
        """Share of look-ups that were hits; None where nothing was looked up."""
        total = sum(self.lookups.values())
        return sum(self.lookups.get(result, 0) for result in HITS) / total if total else None


def make_timeline(events: Sequence[TraceEvent]) -> Timeline:
    """Pairs questions with answers, and outcomes with what became of them.

    A trace says how long an engine worked, not when it began. The shortest time of any answer beyond the
    engine's work is taken as the way there and back, half of it each; an item that took longer waited for
    its turn.
    """
    asked: dict[tuple[Lane, str, int], DraftAsked | VerifySent] = {}
    spans: list[ItemSpan] = []
    marks: list[Mark] = []
    latest: dict[str, DraftAsked] = {}
    used: set[tuple[str, int]] = set()
    for event in events:
        match event:
            case DraftAsked():
                asked[Lane.DRAFT, event.request_id, event.round_id] = event
                latest[event.request_id] = event
            case VerifySent():
                asked[Lane.TARGET, event.request_id, event.round_id] = event
            case DraftReplied():
                question = asked.pop((Lane.DRAFT, event.request_id, event.round_id), None)
                if isinstance(question, DraftAsked):
                    spans.append(_draft_span(question, event))
            case VerdictReceived():
                question = asked.pop((Lane.TARGET, event.request_id, event.round_id), None)
                if isinstance(question, VerifySent):
                    spans.append(_verify_span(question, event))
            case LookedUp():
                marks.append(Mark(event.request_id, event.ns, event.result))
                question = latest.get(event.request_id)
                if question is not None and marks[-1].is_hit:
                    used.add((event.request_id, question.round_id))
            case _:
                pass
    found = [
        replace(span, kind=Kind.USED)
        if span.kind is Kind.WASTED and (span.request_id, span.round_id) in used
        else span
        for span in spans
    ]
    plans = tuple(event for event in events if isinstance(event, Planned))
    decisions = tuple(event for event in events if isinstance(event, Decided | ExperimentEnded))
    return Timeline(tuple(sorted(_placed(found), key=_by_time)), tuple(marks), plans, decisions)


def summarize(timeline: Timeline, events: Sequence[TraceEvent]) -> Summary:
    """Shares and counts over all of a trace."""
    active = _union(_lives(timeline))
    work = {
        lane: _intersect(active, _union((s.start_ns, s.end_ns) for s in timeline.spans if s.lane is lane))
        for lane in Lane
    }
    total = _length(active)
    share = 1 / total if total else 0.0
    verdicts = [
        event for event in events if isinstance(event, VerdictReceived) and event.num_committed_tokens
    ]
    first_token_s, later_tokens_per_s = _first_and_later(events)
    return Summary(
        active_ns=total,
        target_idle=share * (total - _length(work[Lane.TARGET])),
        draft_busy=share * _length(work[Lane.DRAFT]),
        both_busy=share * _length(_intersect(work[Lane.DRAFT], work[Lane.TARGET])),
        num_rounds=len(verdicts),
        num_tokens=sum(event.num_committed_tokens for event in verdicts),
        num_draft_tokens=sum(event.num_draft_tokens for event in verdicts),
        num_accepted_tokens=sum(event.num_accepted_tokens for event in verdicts),
        lookups=dict(Counter(mark.result for mark in timeline.marks)),
        reasons=dict(Counter(event.reason for event in verdicts)),
        first_token_s=first_token_s,
        later_tokens_per_s=later_tokens_per_s,
    )


def _first_and_later(events: Sequence[TraceEvent]) -> tuple[float | None, float | None]:
    began_ns: dict[str, int] = {}
    committed: dict[str, list[VerdictReceived]] = {}
    for event in events:
        if isinstance(event, VerifySent) and event.base_len == 0:
            began_ns.setdefault(event.request_id, event.ns)
        elif (
            isinstance(event, VerdictReceived) and event.num_committed_tokens and event.request_id in began_ns
        ):
            committed.setdefault(event.request_id, []).append(event)
    if not committed:
        return None, None
    first_ns = sum(verdicts[0].ns - began_ns[request_id] for request_id, verdicts in committed.items())
    later_ns = sum(verdicts[-1].ns - verdicts[0].ns for verdicts in committed.values())
    num_later = sum(event.num_committed_tokens for verdicts in committed.values() for event in verdicts[1:])
    return first_ns / 1e9 / len(committed), 1e9 * num_later / later_ns if later_ns else None


def changed_plans(timeline: Timeline) -> list[Planned]:
    """Re-plans whose plan differs from the session's plan before."""
    last: dict[tuple[str, str], tuple[str, int, int]] = {}
    changes = []
    for plan in timeline.plans:
        key, chosen = (plan.request_id, plan.source), (plan.overlap, plan.num_speculative_tokens, plan.width)
        if last.get(key) != chosen:
            changes.append(plan)
        last[key] = chosen
    return changes


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which all sessions worked at one mode, in ns on the router's clock."""

    start_ns: int
    end_ns: int
    mode: str
    is_experiment: bool
    """True if an experiment tried the mode, between two windows at the decided one."""


def stretches(timeline: Timeline) -> list[Stretch]:
    """Returns the stretches from the first decision to the end. An experiment's is as long as its windows."""
    found: list[Stretch] = []
    bounds = [*(event.ns for event in timeline.decisions), timeline.end_ns]
    for event, (start_ns, end_ns) in zip(timeline.decisions, itertools.pairwise(bounds), strict=True):
        mode, is_experiment = _shown(event)
        last = found[-1] if found else None
        if last is not None and (last.mode, last.is_experiment) == (mode, is_experiment):
            found[-1] = replace(last, end_ns=end_ns)
        elif end_ns > start_ns:
            found.append(Stretch(start_ns, end_ns, mode, is_experiment))
    return found


def changed_decisions(timeline: Timeline) -> list[Decided | ExperimentEnded]:
    """Experiments, and the decisions for another mode than the one before."""
    changes: list[Decided | ExperimentEnded] = []
    mode: str | None = None
    for event in timeline.decisions:
        if isinstance(event, ExperimentEnded) or event.tried is not None or event.mode != mode:
            changes.append(event)
        mode = event.mode
    return changes


def _shown(event: Decided | ExperimentEnded) -> tuple[str, bool]:
    if isinstance(event, Decided) and event.tried is not None:
        return event.tried, True
    return event.mode, False


def waits(timeline: Timeline, request_id: str) -> list[Interval]:
    """Returns the gaps between an answer of the target and the session's next item to it."""
    verified = [span for span in timeline.spans if span.lane is Lane.TARGET and span.request_id == request_id]
    return [
        (done.replied_ns, then.asked_ns)
        for done, then in itertools.pairwise(verified)
        if then.asked_ns > done.replied_ns
    ]


def _draft_span(question: DraftAsked, answer: DraftReplied) -> ItemSpan:
    kind = Kind.WASTED if question.fanout else Kind.PROPOSAL
    return ItemSpan(
        answer.request_id,
        answer.round_id,
        Lane.DRAFT,
        Kind.PREFILL if question.base_len == 0 else kind,
        question.ns,
        answer.ns - answer.forward_ns,
        answer.ns,
        answer.ns,
        answer.num_draft_tokens,
        answer.num_branches,
    )


def _verify_span(question: VerifySent, answer: VerdictReceived) -> ItemSpan:
    is_prefill = question.base_len == 0 or answer.num_committed_tokens == 0
    return ItemSpan(
        answer.request_id,
        answer.round_id,
        Lane.TARGET,
        Kind.PREFILL if is_prefill else Kind.VERIFY,
        question.ns,
        answer.ns - answer.forward_ns,
        answer.ns,
        answer.ns,
        answer.num_draft_tokens,
        num_accepted_tokens=answer.num_accepted_tokens,
    )


def _placed(spans: Sequence[ItemSpan]) -> list[ItemSpan]:
    """Moves the work of each span from the end of its answer to where it must have been."""
    ways = {
        lane: min((max(0, span.start_ns - span.asked_ns) for span in spans if span.lane is lane), default=0)
        for lane in Lane
    }
    return [
        replace(
            span, start_ns=span.start_ns - ways[span.lane] // 2, end_ns=span.end_ns - ways[span.lane] // 2
        )
        for span in spans
    ]


def _by_time(span: ItemSpan) -> tuple[int, int]:
    return span.asked_ns, span.replied_ns


def _lives(timeline: Timeline) -> list[Interval]:
    lives: dict[str, Interval] = {}
    for span in timeline.spans:
        first, last = lives.get(span.request_id, (span.asked_ns, span.replied_ns))
        lives[span.request_id] = (min(first, span.asked_ns), max(last, span.replied_ns))
    return list(lives.values())


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersect(ours: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    both: list[Interval] = []
    left, right = 0, 0
    while left < len(ours) and right < len(others):
        start = max(ours[left][0], others[right][0])
        end = min(ours[left][1], others[right][1])
        if start < end:
            both.append((start, end))
        if ours[left][1] < others[right][1]:
            left += 1
        else:
            right += 1
    return both


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
