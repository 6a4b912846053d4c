"""Values of the control: a session's plan and its reason, its statistics, and the mode of all sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, Self

from specray.control.estimators import Rate
from specray.draft_tokens import TreeBudget
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap

REPLAN_ROUNDS = 16
"""Rounds for which a plan holds; the first plans hold for fewer, each twice as long as the one before."""
RATE_TOKENS, RATE_PRIOR_TOKENS = 64, 16
"""Tokens that ``SessionRate`` remembers, and those for which its prior counts."""
MAX_ROUND_SURPRISE = 8.0
"""Longest round that ``SessionRate`` takes, as a multiple of what its tokens take on average."""
PRIOR_GAIN, PRIOR_GROWTH = 1.3, 3.0
"""``TreeStats`` of a draft model before a tree was verified."""
OFF_REPLAN_ROUNDS = 32
"""Rounds for which a plan without speculation holds: nothing is measured meanwhile."""


class Reason(StrEnum):
    """Why a round has its plan. ``docs/control.md`` explains each."""

    FIXED = "fixed"
    """K is set by the configuration or the request; also K = 0."""
    UNMEASURED = "unmeasured"
    """Nothing is known of the target yet: a first K is tried."""
    PROFITABLE = "profitable"
    """Measurements promise more tokens per second with this K than without speculation."""
    TREE = "tree"
    """They promise still more with trees than with chains of this K."""
    UNPROFITABLE = "unprofitable"
    """Measurements promise too little, for all sessions or for the rest of this one."""
    EXPERIMENT = "experiment"
    """An A/B experiment of all sessions tries another mode for a few steps."""
    EXPLORATION = "exploration"
    """Speculation is off, and one session tries it for two rounds."""
    LAST_TOKEN = "last_token"
    """One output token is left: a draft token could not be used."""
    NO_DRAFT = "no_draft"
    """No draft is leased."""
    STALLED = "stalled"
    """The draft has not answered for longer than a round waits for it."""
    REFUSED = "refused"
    """The draft refused the session, or several drafts were lost with it."""
    TOO_LONG = "too_long"
    """The session is longer than the draft's ``max_model_len``."""
    DRAFT_PREFILL = "draft_prefill"
    """The draft has yet to read the session's tokens."""
    PROMPTS_FIRST = "prompts_first"
    """Several prompts wait to be prefilled: the step's rows are theirs."""
    PREFILL = "prefill"
    """The round computes the session's own prompt."""
    SERVICE_LEVEL = "service_level"
    """Another session's service level is at risk, and this one leaves its rows to it."""
    LOCAL = "local"
    """The request is drafted for without a draft model."""
    NGRAM = "ngram"
    """The n-gram fallback found a repetition that promises more than asking the draft."""
    GRAMMAR = "grammar"
    """The grammar forces the next tokens, which promises more than asking the draft."""
    PREDICTION = "prediction"
    """The output follows what the request predicts of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a session speculates until it is re-planned, and why."""

    num_speculative_tokens: int
    """Most draft tokens of a proposal; 0: no speculation."""
    overlap: Overlap = Overlap.SERIAL
    width: int = 1
    """Branches per number of accepted tokens, on average, under enumeration; the draft chooses which."""
    min_acceptance: float = field(default=0.0, compare=False)
    """Least P(all of a proposal is accepted), by the draft; below it the proposal ends. 0: no bound."""
    tree: TreeBudget | None = field(default=None, compare=False)
    """What proposals may be: trees, whose paths have at most ``num_speculative_tokens``. None:
    chains."""
    reason: Reason = field(default=Reason.PROFITABLE, compare=False)

    @property
    def is_off(self) -> bool:
        return self.num_speculative_tokens == 0

    def within(self, num_tokens: int) -> Plan:
        """The same, of at most ``num_tokens`` draft tokens."""
        if self.num_speculative_tokens <= num_tokens:
            return self
        return replace(self, num_speculative_tokens=num_tokens)

    @property
    def num_tree_nodes(self) -> int:
        """Most nodes of a tree; 0: a chain."""
        return 0 if self.tree is None else self.tree.num_nodes

    @property
    def overlap_label(self) -> str:
        """``off``, or the overlap: as metrics and traces have it."""
        return "off" if self.is_off else self.overlap.value


OFF_BY_REASON: Final[Mapping[Reason, Plan]] = MappingProxyType(
    {reason: Plan(0, reason=reason) for reason in Reason}
)
OFF: Final = OFF_BY_REASON[Reason.UNPROFITABLE]


class Mode(IntEnum):
    """How all sessions of a router draft; each mode includes those below it."""

    PLAIN = 0
    """No draft tokens: one token per step and session."""
    NGRAM = 1
    """Draft tokens of the n-gram fallback alone."""
    MODEL = 2
    """Draft tokens of the draft model, and of the n-gram fallback where the model has none."""

    @property
    def label(self) -> str:
        """``plain``, ``ngram`` or ``model``: as metrics and traces have it."""
        return self.name.lower()


class _Rates:
    """Rates that are forgotten together."""

    __slots__: tuple[str, ...] = ()

    def start(self, weight: float, *, fading: float = 0.98) -> Self:
        """The statistics of a new session, with these as its prior."""
        return type(self)(*(Rate(rate.value, weight, fading=fading) for rate in self._all()))

    def decay(self, share: float) -> None:
        """Forgets a share of the verdicts."""
        for rate in self._all():
            rate.decay(share)

    def _all(self) -> list[Rate]:
        return [getattr(self, name) for name in self.__slots__]


@dataclass(slots=True)
class BoundedProposalStats(_Rates):
    """Averages of proposals without a largest K, which end where the draft is too unsure.

    Measured as they are: a draft is sure for long in texts in which it is right, so rates per token
    underestimate such proposals.
    """

    num_drafts: Rate
    """Draft tokens per proposal."""
    num_accepted: Rate
    """Accepted tokens per proposal."""

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts.add(num_drafts, 1)
        self.num_accepted.add(num_accepted, 1)


@dataclass(slots=True)
class TreeStats(_Rates):
    """Trees, compared with their first chains, which would have been proposed alone."""

    gain: Rate
    """Accepted tokens of trees, per accepted token of their first chains."""
    growth: Rate
    """Nodes of trees, per token of their first chains."""

    def add(self, verdict: TreeVerdict) -> None:
        self.gain.add(verdict.num_accepted, verdict.num_chain_accepted)
        self.growth.add(verdict.num_nodes, verdict.num_chain_nodes)


class TreeVerdict(NamedTuple):
    """What was accepted of a tree, and what would have been of its first chain alone."""

    num_nodes: int
    num_accepted: int
    num_chain_nodes: int
    num_chain_accepted: int


@dataclass(slots=True)
class SessionRate:
    """Tokens per second of one session's rounds: of some hundred tokens, older ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Takes a round. A pause counts for no more than a few rounds of its size."""
        if self.tokens > 0:
            seconds = min(seconds, MAX_ROUND_SURPRISE * num_tokens * self.seconds / self.tokens)
        kept = (1 - 1 / RATE_TOKENS) ** num_tokens
        self.tokens, self.seconds = kept * self.tokens + num_tokens, kept * self.seconds + seconds

    def value(self, prior: float) -> float:
        """Tokens per second, with ``prior`` tokens per second as its first rounds."""
        num_prior = RATE_PRIOR_TOKENS * max(0.0, 1 - self.tokens / RATE_TOKENS)
        return (self.tokens + num_prior) / (self.seconds + num_prior / prior)


@dataclass(slots=True)
class SessionStats:
    """One session's measurements and plan. Only the controller, with its service rates, writes to it."""

    acceptance: Rate
    """P(a draft token is accepted), given that those before it are."""
    continuation: Rate
    """P(the draft continues after a token), under a bound."""
    bounded: BoundedProposalStats
    tree: TreeStats = field(default_factory=lambda: TreeStats(Rate(PRIOR_GAIN), Rate(PRIOR_GROWTH)))
    request_id: str = ""
    adapter: bytes = field(default=b"", kw_only=True)
    """Digest of the session's adapter; empty: the base."""
    fixed_k: int | None = None
    """K of the configuration or the request; None: chosen by measurement."""
    max_k: int = MAX_SPECULATIVE_TOKENS
    """Largest K that may be chosen."""
    draft_knows_acceptance: bool = True
    """The draft can estimate a token's acceptance; False where rejection sampling draws the draft tokens."""
    plan: Plan | None = None
    """Plan until the next re-plan; None: there was none yet."""
    num_remaining: int = 0
    """Output tokens that may still come, at the last call of ``plan``."""
    num_unread: int = 0
    """Committed tokens that the draft had not been sent at that call; it prefills them before it proposes."""
    num_asked: int = 0
    """Most draft tokens of the proposal that is verified next, if it has a bound; else 0."""
    rounds_to_replan: int = 0
    replan_rounds: int = 4
    """Rounds for which the next plan will hold."""
    rounds_off: int = 0
    """Rounds since the session last had draft tokens."""
    is_exploring: bool = False
    """The plan is an exploration while speculation is off."""
    num_changes: int = 0
    """Value of ``ModeController.num_changes`` at the last re-plan."""
    rest_rounds: int = 0
    """Rounds for which the draft is not asked, after it refused the session."""
    rounds_since_ngram: int = 1 << 60
    """Rounds since it last had draft tokens of something else."""
    rounds_to_ask: int = 0
    """Rounds until asking the draft is considered again, where it was not worth it for the only session."""
    rate: SessionRate = field(default_factory=SessionRate)
    """What its rounds have brought, whoever drafted."""
    promised: float = 0.0
    """Tokens per second that its best plan without overlap promised at the last re-plan; 0: unknown."""


class Observer(Protocol):
    """Receives what the control decides; the router passes it to metrics and trace."""

    def replanned(
        self,
        stats: SessionStats,
        plan: Plan,
        *,
        source: str,
        num_running: int,
        predict: Callable[[], Mapping[str, float]],
    ) -> None:
        """A session has a new plan; ``source`` drafts under it.

        ``predict`` gives tokens per second of the best plan by overlap label; empty while unmeasured.
        """

    def decided(
        self,
        mode: Mode,
        tried: Mode | None,
        *,
        predicted_speedup: float,
        calibrated_speedup: float,
        num_running: int,
    ) -> None:
        """All sessions have decided their mode; ``tried``: of the experiment that begins, if one does.

        Speedups of the draft model are multiples of plain decoding; experiments correct the calibrated one.
        """

    def chose_overlap(
        self, *, is_overlapped: bool, predicted_gain: float, calibrated_gain: float, num_running: int
    ) -> None:
        """The control has decided, under ``overlap: auto``, whether engines overlap.

        Gains are tokens per second of overlapping as a multiple of those of taking turns; what rounds have
        brought corrects the calibrated one.
        """

    def experiment_ended(
        self,
        *,
        base: Mode,
        tried: Mode,
        speculating: Mode,
        predicted_speedup: float,
        measured_speedup: float | None,
    ) -> None:
        """An A/B experiment has ended; ``speculating``: the one of both modes that does more of it.

        Speedups are of that mode over the other; the measured one is None if the experiment was given up.
        """
