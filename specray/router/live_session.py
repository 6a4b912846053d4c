"""``LiveSession``: a session with its caller, times and statistics; what the loop keeps per request."""

from __future__ import annotations

from dataclasses import dataclass, field

from specray.control.state import OFF, OFF_BY_REASON, Plan, Reason, SessionStats
from specray.requests import RequestLife
from specray.round_reports import RoundReport
from specray.router.output.delivery import Delivery
from specray.router.output.watch import RoundWatch
from specray.router.proposers.local import LocalProposer
from specray.router.proposers.prediction import SessionPrediction
from specray.router.session.session import Session
from specray.router.session.values import RoundTimer


@dataclass(slots=True, eq=False)
class LiveSession:
    """One request between arrival and end. Seconds are on the router's clock."""

    session: Session
    delivery: Delivery
    stats: SessionStats
    arrived_s: float
    deadline_s: float
    local: LocalProposer | None = None
    """Proposer that drafts for it without a model, or fills in for the model; None: none does."""
    prediction: SessionPrediction | None = None
    """Proposer of the output that the request predicts; None: it predicts none."""
    watch: RoundWatch | None = None
    """Recorder of its rounds; None: its caller does not watch them."""
    num_quiet: int = 0
    """Rounds in a row for which nothing was worth proposing."""
    runs_on: bool = False
    """The target was told with the last round that the next one is plain."""
    last_step: int = 0
    """Number of the target step that it was last part of."""
    plan: Plan = field(default=OFF_BY_REASON[Reason.PREFILL])
    """Plan of the next round."""
    round_plan: Plan = field(default=OFF_BY_REASON[Reason.PREFILL])
    """Plan of the round in flight."""
    ahead: Plan = field(default=OFF)
    """Plan under which the draft was asked for outcomes of the round in flight."""
    timer: RoundTimer = field(default_factory=RoundTimer)
    """Timer of the round in flight."""
    num_draft_losses: int = 0
    """Drafts lost in a row while they owed this session an answer."""
    num_target_losses: int = 0
    """Targets lost in a row while they worked on this session."""
    committed_s: float | None = None
    """Time at which tokens were committed last."""
    admitted_s: float | None = None
    """Time at which it left the queue for the first time."""
    first_token_s: float | None = None
    num_first_tokens: int = 0
    """Tokens that were committed then."""
    pace_s: float | None = None
    """Seconds per output token of late; None: no more than its first tokens are there."""
    num_preemptions: int = 0
    prefill_since_s: float | None = None
    """Time when the draft was given the last prefill chunk."""

    @property
    def first_token_due_s(self) -> float | None:
        """Time at which its service level wants the first token; None: it has none, or the token is there."""
        level = self.session.request.level
        if level is None or level.ttft_ms is None or self.first_token_s is not None:
            return None
        return self.arrived_s + level.ttft_ms / 1e3

    def pace(self, num_tokens: int, seconds: float) -> None:
        """Takes the seconds that the last tokens took; some sixteen tokens are remembered."""
        each_s = seconds / num_tokens
        weight = min(1.0, num_tokens / 16)
        self.pace_s = each_s if self.pace_s is None else self.pace_s + weight * (each_s - self.pace_s)

    @property
    def request_id(self) -> str:
        return self.session.request_id

    @property
    def is_resumed(self) -> bool:
        """Another router had let it in, and was lost."""
        return self.session.request.resumed is not None

    @property
    def tenant(self) -> str:
        return self.session.request.tenant

    @property
    def priority(self) -> int:
        return self.session.request.priority

    @property
    def adapter(self) -> bytes:
        """Digest of its adapter; empty: the base."""
        return self.session.request.sampling.adapter

    @property
    def num_queued_tokens(self) -> int:
        return len(self.session.committed)

    @property
    def num_expected_tokens(self) -> int:
        return self.session.num_prompt_tokens + self.session.request.max_tokens

    @property
    def is_drafted_locally(self) -> bool:
        """No draft model is asked for it."""
        return self.local is not None and not self.local.is_fallback

    @property
    def is_predicted(self) -> bool:
        """The output follows its prediction: the draft model need not be asked."""
        return self.prediction is not None and self.prediction.is_followed

    @property
    def is_repeating(self) -> bool:
        """The output goes on as it did before: the draft model need not be asked."""
        return self.local is not None and self.local.is_long

    def life(self, now: float) -> RequestLife:
        """The summary of the request, which ends now with a finish reason."""
        session = self.session
        assert session.finish_reason is not None
        return RequestLife(
            request_id=self.request_id,
            traceparent=session.request.traceparent,
            arrived_s=self.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            ended_s=now,
            finish_reason=session.finish_reason,
            num_prompt_tokens=session.num_prompt_tokens,
            num_cached_tokens=session.num_cached_tokens,
            num_output_tokens=session.num_output_tokens,
            num_rounds=session.tally.num_rounds,
            num_preemptions=self.num_preemptions,
            stats=session.tally.stats,
        )

    def take_reports(self) -> tuple[RoundReport, ...]:
        return () if self.watch is None else self.watch.take()

    @property
    def is_prefilling(self) -> bool:
        return self.session.is_prefilling

    @property
    def num_missing(self) -> int:
        return self.session.num_missing

    @property
    def num_rows(self) -> int:
        """What the target computes for it in the next step, if there is room: accepted draft tokens, which
        it is sent once more, it has computed already."""
        return (self.num_missing if self.is_prefilling else 1) + self.num_drafted

    @property
    def num_unread(self) -> int:
        """Committed tokens that the draft was not sent."""
        return len(self.session.committed) - self.session.draft.synced_len

    @property
    def num_drafted(self) -> int:
        drafted = self.session.drafted
        return 0 if drafted is None else len(drafted.token_ids)
