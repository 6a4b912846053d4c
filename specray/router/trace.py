"""Records what the router decided and when: a ring of the last events, for debugging and for timelines.

Times are nanoseconds on the router's own clock; durations of engines are from their replies. Events hold no
tokens. Callers that watch their requests get their rounds from the same places. With nobody watching
and no events to keep, a hook is two comparisons.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, get_args
from weakref import WeakValueDictionary

from specray.control.state import Plan
from specray.errors import ConfigError
from specray.interfaces import Clock
from specray.router.output.watch import RoundWatch
from specray.router.session.values import Commit
from specray.types import (
    DraftReplies,
    DraftReply,
    Outcomes,
    Proposal,
    SpeculateItem,
    TargetReplies,
    Verdict,
    VerifyItem,
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A session was re-planned: the plan holds until the next re-plan."""

    ns: int
    request_id: str
    source: str
    """Proposer under the plan: the draft model, or one without a model."""
    overlap: str
    num_speculative_tokens: int
    width: int
    """Branches per number of accepted tokens under enumeration."""
    reason: str
    num_running: int
    acceptance: float
    tokens_per_s: Mapping[str, float]
    """Predictions for the best plan by overlap label; empty before anything is known of the target."""


@dataclass(frozen=True, slots=True)
class Routed:
    """An ingress chose the router of a request; times are on its own clock."""

    ns: int
    request_id: str
    router: str
    reason: str
    costs: Mapping[str, float]
    """Predicted seconds of every router."""
    num_prompt_tokens: int
    num_expected_tokens: int
    """Prompt tokens that the router was expected to find in its cache."""


@dataclass(frozen=True, slots=True)
class Decided:
    """All sessions decided their mode: plain, ngram or model."""

    ns: int
    mode: str
    tried: str | None
    """Mode of an experiment that begins; None: none begins."""
    predicted_speedup: float
    """Tokens per second with the model, as a multiple of plain decoding."""
    calibrated_speedup: float
    """The predicted speedup, corrected by what experiments measured."""
    num_running: int


@dataclass(frozen=True, slots=True)
class OverlapChosen:
    """A decision under ``overlap: auto`` whether engines overlap."""

    ns: int
    is_overlapped: bool
    predicted_gain: float
    """Predicted tokens per second of overlapping, as a multiple of those of taking turns."""
    calibrated_gain: float
    """The predicted gain, corrected by what rounds have brought."""
    num_running: int


@dataclass(frozen=True, slots=True)
class ExperimentEnded:
    """An A/B experiment is over: a window at another mode between two at the decided one."""

    ns: int
    mode: str
    tried: str
    speculating: str
    """Mode that speculates more, of the decided one and the tried one."""
    predicted_speedup: float
    """Predicted tokens per second of the speculating mode, as a multiple of plain decoding."""
    measured_speedup: float | None
    """Measured tokens per second of the speculating mode over the other's; None: the experiment was given
    up."""


@dataclass(frozen=True, slots=True)
class DraftAsked:
    """The draft was asked for a proposal, or with a fan-out for outcomes of the round that was just sent."""

    ns: int
    request_id: str
    round_id: int
    base_len: int
    num_new_tokens: int
    num_speculative_tokens: int
    fanout: tuple[int, ...]
    max_branches: int = 0
    """Most branches of all outcomes together; 0: as the fan-out says."""
    min_acceptance: float = 0.0
    """Probability of full acceptance, as the draft estimates it, below which a proposal ends."""
    num_tree_nodes: int = 0


@dataclass(frozen=True, slots=True)
class DraftReplied:
    """The draft answered; ``kind``: proposal, outcomes, unknown_sequence or item_failed."""

    ns: int
    request_id: str
    round_id: int
    kind: str
    forward_ns: int
    """Duration of the whole draft step, which other sessions may share."""
    num_draft_tokens: int
    num_branches: int
    is_late: bool


@dataclass(frozen=True, slots=True)
class DraftSkipped:
    """A round went on without draft tokens, after it had waited too long for the draft."""

    ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class VerifySent:
    """A session's item of a target step was sent."""

    ns: int
    request_id: str
    round_id: int
    step: int
    base_len: int
    num_new_tokens: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class VerdictReceived:
    """The target answered an item."""

    ns: int
    request_id: str
    round_id: int
    forward_ns: int
    source: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    """Tokens that the verdict added to the output; 0 for a chunk of a prompt."""
    reason: str
    """Reason of the round's plan, a ``control.state.Reason``."""
    depth: int | None = None
    """Draft tokens of a tree that could have been accepted, those of its longest path; None: a chain."""
    num_experts: int | None = None
    """Distinct experts that the step's rows hit, in all layers; None: there are none, or not counted."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A verdict was looked up in the outcomes; ``result`` as in ``specray_outcomes_total``."""

    ns: int
    request_id: str
    result: str
    num_draft_tokens: int
    """Draft tokens that are ready for the next round."""


TraceEvent = (
    Planned
    | Decided
    | ExperimentEnded
    | OverlapChosen
    | Routed
    | DraftAsked
    | DraftReplied
    | DraftSkipped
    | VerifySent
    | VerdictReceived
    | LookedUp
)
_NAMES: Final[Mapping[str, type[TraceEvent]]] = MappingProxyType(
    {re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in get_args(TraceEvent)}
)
"""Kinds of events by the names that a trace has for them: ``DraftAsked`` is ``draft_asked``."""
_BY_TYPE: Final[Mapping[type[TraceEvent], str]] = MappingProxyType(
    {kind: name for name, kind in _NAMES.items()}
)


class Trace:
    """The last ``max_events`` events, oldest first, and the watches of requests.

    Args:
        max_events: most events; the oldest are forgotten. 0: none are kept.
    """

    def __init__(self, clock: Clock, max_events: int) -> None:
        self._clock = clock
        self._keeps_events = max_events > 0
        self._events: deque[TraceEvent] = deque(maxlen=max_events)
        self._watches: WeakValueDictionary[str, RoundWatch] = WeakValueDictionary()

    def watch(self, request_id: str) -> RoundWatch:
        """Records the rounds of a request that arrives now, as long as the caller holds what is returned."""
        watch = self._watches[request_id] = RoundWatch(self._clock.monotonic, self._clock.monotonic())
        return watch

    @property
    def events(self) -> list[TraceEvent]:
        return list(self._events)

    def planned(self, request_id: str, source: str, **decision: Any) -> None:
        self._events.append(Planned(self._ns(), request_id, source, **decision))

    def decided(self, **decision: Any) -> None:
        self._events.append(Decided(self._ns(), **decision))

    def chose_overlap(self, **choice: Any) -> None:
        self._events.append(OverlapChosen(self._ns(), **choice))

    def experiment_ended(self, **result: Any) -> None:
        self._events.append(ExperimentEnded(self._ns(), **result))

    def draft_asked(self, item: SpeculateItem) -> None:
        if (watch := self._watch_of(item.request_id)) is not None:
            watch.draft_asked()
        if not self._keeps_events:
            return
        self._events.append(
            DraftAsked(
                self._ns(),
                item.request_id,
                item.round_id,
                item.base_len,
                len(item.token_ids),
                item.num_speculative_tokens,
                item.fanout,
                item.max_branches,
                item.min_acceptance,
                0 if item.tree is None else item.tree.num_nodes,
            )
        )

    def draft_replied(self, reply: DraftReply, replies: DraftReplies, *, is_late: bool) -> None:
        if not is_late and (watch := self._watch_of(reply.request_id)) is not None:
            watch.draft_replied(replies.forward_ns)
        if not self._keeps_events:
            return
        num_branches = 0
        match reply:
            case Proposal():
                kind, num_tokens = "proposal", len(reply.draft.token_ids)
            case Outcomes():
                kind, num_branches = "outcomes", len(reply.branches)
                num_tokens = sum(len(branch.draft.token_ids) for branch in reply.branches)
            case _:
                kind, num_tokens = _name_of(reply), 0
        self._events.append(
            DraftReplied(
                self._ns(),
                reply.request_id,
                reply.round_id,
                kind,
                replies.forward_ns,
                num_tokens,
                num_branches,
                is_late,
            )
        )

    def draft_skipped(self, request_id: str) -> None:
        if self._keeps_events:
            self._events.append(DraftSkipped(self._ns(), request_id))

    def verify_sent(self, item: VerifyItem, *, step: int, num_rows: int) -> None:
        """Records an item; ``num_rows`` is the number of its tokens for which the step has room."""
        if (watch := self._watch_of(item.request_id)) is not None:
            watch.verify_sent(item)
        if not self._keeps_events:
            return
        num_drafts = len(item.draft.token_ids)
        self._events.append(
            VerifySent(
                self._ns(),
                item.request_id,
                item.round_id,
                step,
                item.base_len,
                num_rows - num_drafts,
                num_drafts,
            )
        )

    def verdict_received(self, verdict: Verdict, commit: Commit, replies: TargetReplies, plan: Plan) -> None:
        """Records a verdict; ``plan`` is the round's."""
        if commit.token_ids and (watch := self._watch_of(verdict.request_id)) is not None:
            watch.committed(commit, plan, replies.forward_ns)
        if not self._keeps_events:
            return
        self._events.append(
            VerdictReceived(
                self._ns(),
                verdict.request_id,
                verdict.round_id,
                replies.forward_ns,
                commit.source,
                commit.num_draft_tokens,
                commit.num_accepted_tokens,
                len(commit.token_ids),
                plan.reason.value,
                None if commit.depth == commit.num_draft_tokens else commit.depth,
                replies.num_experts,
            )
        )

    def looked_up(self, request_id: str, result: str, num_draft_tokens: int) -> None:
        if (watch := self._watch_of(request_id)) is not None:
            watch.looked_up(result)
        if self._keeps_events:
            self._events.append(LookedUp(self._ns(), request_id, result, num_draft_tokens))

    def _watch_of(self, request_id: str) -> RoundWatch | None:
        return self._watches.get(request_id) if self._watches else None

    def _ns(self) -> int:
        return round(self._clock.monotonic() * 1e9)


def _name_of(reply: DraftReply) -> str:
    name = type(reply).__name__
    return "unknown_sequence" if name == "UnknownSequence" else "item_failed"


def encode_trace(events: list[TraceEvent]) -> str:
    """JSON lines: the event's name and its fields."""
    return "".join(json.dumps({"event": _BY_TYPE[type(event)], **asdict(event)}) + "\n" for event in events)


def decode_trace(text: str) -> list[TraceEvent]:
    """Reads what ``encode_trace`` wrote. Raises ConfigError naming the line."""
    events: list[TraceEvent] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            kind = _NAMES[values.pop("event")]
            if kind is DraftAsked:
                values["fanout"] = tuple(values["fanout"])
            events.append(kind(**values))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"line {number} is no event of a trace: {line[:80]!r}") from None
    return events
