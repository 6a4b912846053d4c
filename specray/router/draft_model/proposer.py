"""The draft model as a proposer: what the draft is asked and when, what its answers are worth, its loss.

Tokens that it was not sent it prefills first, long prompts in chunks (``prefill``): rounds go without it
until then.

A draft is never waited for beyond ``patience_s``, a few times what it usually takes: a session whose proposal
is late goes on without one in that round. A draft that has not answered anything for that time is asked
nothing more until it answers, and after ``round_timeout_s`` it is given up and another is leased. So a draft
that hangs costs its sessions a second or so, and one that is only slow is not lost for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Literal

from specray.control.controller import Controller
from specray.control.goodput import max_branches
from specray.control.state import OFF_BY_REASON, Plan, Reason
from specray.router.deferred import Later
from specray.router.draft_model.budgets import Budgets, FeatureRoom, feature_size, needs_chunk
from specray.router.draft_model.prefill import DraftPrefill, are_prompts_first
from specray.router.draft_model.waits import DraftWaits, patience_s
from specray.router.live_session import LiveSession
from specray.router.proposers.base import PENDING, Budget, Pending
from specray.router.session.session import Session
from specray.router.session.values import Commit, Lookup
from specray.router.settings import Settings
from specray.router.trace import Trace
from specray.router.transport.leases import DraftLeases
from specray.router.transport.links import DraftLink
from specray.telemetry.metrics import RouterMetrics
from specray.types import (
    DraftKind,
    DraftReplies,
    DraftReply,
    ItemFailed,
    Outcomes,
    Proposal,
    SpeculateItem,
    UnknownSequence,
)

logger = logging.getLogger(__name__)

MAX_DRAFT_LOSSES = 3
"""Drafts in a row lost with one request, from which on it may be what ended them."""


class ModelProposer:
    """Proposer that asks a leased draft model, for all running sessions.

    Args:
        leases: hold the link; None: nothing is ever drafted.
    """

    def __init__(
        self,
        leases: DraftLeases | None,
        running: dict[str, LiveSession],
        controller: Controller,
        metrics: RouterMetrics,
        later: Later,
        *,
        settings: Settings,
        trace: Trace,
    ) -> None:
        self._leases = leases
        self._running = running
        self._controller = controller
        self._metrics = metrics
        self._later = later
        self._settings = settings
        self._budgets = Budgets(controller.cost_model, max_k=lambda: controller.max_k)
        self._waits = DraftWaits(running)
        self._prefill = DraftPrefill(
            running,
            self._budgets,
            max_tokens=lambda: settings.router.prefill_chunk_tokens,
            patience_s=self._patience_s,
            is_draft_idle=partial(are_prompts_first, running),
        )
        self._trace = trace
        self._features = FeatureRoom()

    @property
    def source(self) -> str:
        return DraftKind.MODEL.value

    @property
    def link(self) -> DraftLink | None:
        return None if self._leases is None else self._leases.link

    async def close(self) -> None:
        if self._leases is not None:
            await self._leases.close()

    # Questions

    def begin_questions(self) -> None:
        self._prefill.begin()

    def plan_question(self, live: LiveSession, now: float) -> Plan:
        """Plan under which the draft is asked for a proposal; off: it is not asked, and why.

        Takes the room for the tokens that the draft must prefill first.
        """
        plan = self._plan(live, live.session.num_remaining, now)
        if plan.is_off or (self._can_ask(live) and self._prefill.can_ask(live)):
            return plan
        self._controller.postpone_exploration(live.stats)
        return OFF_BY_REASON[Reason.DRAFT_PREFILL]

    def is_resting(self, live: LiveSession) -> bool:
        """Whether the draft will not be asked for the session's next round, either."""
        has_draft = self.link is not None or self._leases is not None
        return not has_draft or self._controller.resting_plan(live.stats, len(self._running)) is not None

    def _can_ask(self, live: LiveSession) -> bool:
        """The draft uses no features, or has all that it needs with a question."""
        return not feature_size(self.link) or self._features.can_ask(live.session)

    def ask_features(self, live: LiveSession) -> None:
        """Decides, before a Verify is made, whether its verdict is to bring features for the draft."""
        size = feature_size(self.link)
        if size and (
            live.is_drafted_locally
            or self._controller.resting_plan(live.stats, len(self._running)) is not None
        ):
            size = 0
        live.session.features.feature_size = size

    def propose(self, session: Session, budget: Budget) -> Literal[Pending.PENDING] | None:
        """Asks the draft for a proposal under ``budget.plan``; the reply reaches the session later."""
        live, now = self._running[session.request_id], budget.now
        plan = self.plan_question(live, now) if budget.plan is None else budget.plan
        if plan.is_off:
            return None
        self._ask(session, plan, now)
        self._waits.begin(session.request_id, now)
        live.timer.restart(now)
        return PENDING

    def prefill(self, now: float, *, step: int) -> bool:
        """Gives the draft prefill chunks while the target works on ``step``: prompts above all.

        With the last chunk of a prompt that the target is prefilling too, it is asked what follows.

        Returns:
            True: the draft has chunks to prefill.
        """
        # What it was asked goes first, and is answered before it prefills.
        self.flush()
        self._prefill.begin()
        self._prefill.begin_step(step)
        uses_features = feature_size(self.link) > 0
        for live in self._running.values():
            session, is_due = live.session, self._prefill.is_due(live)
            if live.is_drafted_locally or not (is_due or (uses_features and needs_chunk(session))):
                continue
            if self._controller.resting_plan(live.stats, len(self._running)) is not None:
                continue
            plan = self._plan(live, session.num_remaining, now)
            if plan.is_off or (uses_features and not self._features.fits(session)):
                continue
            num_tokens = self._prefill.share(live) if is_due else 0
            if is_due and num_tokens == 0:
                continue
            is_last = num_tokens == live.num_unread and session.is_prefilling and not live.is_predicted
            if is_last and not uses_features:
                live.plan = plan
                self._ask(session, plan, now)
            else:
                self._push(session.prefill_chunk_item(num_tokens), now)
                self._prefill.note(live, now)
        return self._prefill.is_going_on

    def draft_ahead(self, verified: Iterable[LiveSession], now: float) -> bool:
        """Asks for the outcomes of the rounds that have just been sent. True: the draft was given work."""
        is_asked = False
        for live in verified:
            session = live.session
            verifying = session.target.in_flight
            if live.is_drafted_locally or verifying is None or not verifying.sample:
                continue
            if live.is_predicted or live.is_repeating:
                # It is known what follows; where the output leaves it, the draft is asked afresh.
                continue
            if session.draft.in_flight is not None or verifying.runs_on:
                continue
            # At least one token of this round will be committed before the next.
            plan = self._plan(live, session.num_remaining - 1, now)
            num_drafts = len(verifying.draft.first_path)
            # Under rejection chances follow from ranks alone, the same for all nodes of a tree.
            is_sampled = session.request.sampling.draws_by_rejection
            num_others = 0 if is_sampled else len(verifying.draft) - num_drafts
            fanout = self._controller.fanout(plan, num_drafts, num_others)
            most = max_branches(plan, num_drafts, num_running=len(self._running))
            if fanout and self._can_ask(live) and self._prefill.can_ask(live):
                live.ahead = plan
                self._push(session.outcomes_item(plan.num_speculative_tokens, fanout, most), now)
                is_asked = True
        return is_asked

    def release(self, request_id: str) -> None:
        if self.link is not None:
            self.link.release(request_id)

    def flush(self) -> None:
        """Sends what was asked."""
        self._features.begin()
        if self.link is not None:
            self.link.flush()

    # Answers

    def observe(self, session: Session, commit: Commit) -> None:
        """Learns from a verdict of a session; draft tokens of others count as a round without the model."""
        live, num_running = self._running.get(session.request_id), len(self._running)
        if live is None:
            return
        is_own, chain = commit.source == self.source, (commit.num_chain_tokens, commit.num_chain_accepted)
        if is_own and commit.tree is not None:
            self._controller.observe_tree(live.stats, commit.tree)
        has_ngram = not is_own and commit.num_draft_tokens > 0
        self._controller.observe_round(live.stats, *(chain if is_own else (0, 0)), has_ngram=has_ngram)
        if self._controller.is_replan_near(live.stats, num_running):
            self._later.add(self._prepare, live, num_running)

    def _prepare(self, live: LiveSession, num_running: int) -> None:
        unread, remaining = live.num_unread, live.session.num_remaining
        self._controller.prepare(live.stats, num_running, num_remaining=remaining, num_unread=unread)

    def on_replies(self, link: DraftLink, replies: DraftReplies, now: float) -> list[LiveSession]:
        """Takes a batch of replies; those of a link that was given up are late.

        Returns:
            Sessions whose verdict had come before its outcomes, which these have now settled.
        """
        if replies.is_draining and self._leases is not None:
            self._leases.leave(link, is_wanted=bool(self._running))
        if not replies.replies:
            return []
        self._later.add(self._metrics.draft_forward_s.observe, replies.forward_ns / 1e9)
        asked_since = link.take_unanswered_since()
        settled: list[LiveSession] = []
        answered: list[tuple[SpeculateItem, DraftReply]] = []
        for reply in replies.replies:
            live = self._running.get(reply.request_id)
            asked = None if live is None else live.session.draft.in_flight
            had_open_verdict = live is not None and live.session.has_open_verdict
            is_taken = live is not None and link is self.link and self._take(live, reply)
            if live is not None and is_taken and had_open_verdict and isinstance(reply, (Proposal, Outcomes)):
                settled.append(live)
                self._on_late_outcomes(live)
            self._trace.draft_replied(reply, replies, is_late=not is_taken)
            if live is None or not is_taken:
                self._metrics.late_replies.labels("draft").inc()
                continue
            if asked is not None and isinstance(reply, (Proposal, Outcomes)):
                answered.append((asked, reply))
                if isinstance(reply, Proposal) and asked.min_acceptance:
                    num_drafts = len(reply.draft.first_chain())
                    self._controller.observe_proposal(live.stats, asked.num_speculative_tokens, num_drafts)
            if self._waits.end(live) and isinstance(reply, Proposal):
                live.timer.add_draft_step(replies.forward_ns / 1e9)
        # What was computed for sessions that have ended is no part of the others' steps.
        if asked_since is not None and len(answered) == len(replies.replies):
            forward_s = replies.forward_ns / 1e9
            transport_s = now - asked_since - forward_s
            self._controller.cost_model.observe_draft_step(answered, forward_s, transport_s)
        return settled

    def _on_late_outcomes(self, live: LiveSession) -> None:
        is_hit = live.session.drafted is not None
        self._count_lookup(live, "late_hit" if is_hit else "late_miss")
        self._controller.observe_lookup(live.ahead, is_hit=is_hit)

    def _take(self, live: LiveSession, reply: DraftReply) -> bool:
        session = live.session
        live.num_draft_losses = 0
        match reply:
            case Proposal():
                return session.on_proposal(reply)
            case Outcomes():
                return session.on_outcomes(reply)
            case UnknownSequence() if reply.base_len > 0:
                return session.on_draft_refused(reply)
            case UnknownSequence() | ItemFailed():
                # A draft that does not know a sequence sent from its first token on would be asked for ever.
                reason = reply.message if isinstance(reply, ItemFailed) else "unknown from its first token"
                said = {"request_id": reply.request_id}
                logger.info("the draft refused a request: %s", reason, extra=said)
                self._controller.observe_refusal(live.stats)
                return session.on_draft_refused(reply)

    def on_lookup(self, live: LiveSession, lookup: Lookup, now: float) -> None:
        """What the outcomes said of a verdict that has just been committed."""
        if lookup is Lookup.PENDING:
            self._waits.begin(live.request_id, now)
        elif lookup is not Lookup.NOT_ASKED:
            self._count_lookup(live, lookup.value)
            self._controller.observe_lookup(live.ahead, is_hit=lookup is Lookup.HIT)

    def _count_lookup(self, live: LiveSession, result: str) -> None:
        self._later.add(self._metrics.observe_lookup, result, live.num_drafted)
        self._trace.looked_up(live.request_id, result, live.num_drafted)

    # Losses

    def on_lost(self, link: DraftLink, reason: object) -> None:
        """The draft is gone: all sessions go on without, at once, and come back to it with base_len 0."""
        if self._leases is None or not self._leases.lose(link):
            return
        logger.warning("draft lost, decoding without: %s", reason)
        for live in self._running.values():
            if live.session.draft.in_flight is not None:
                live.num_draft_losses += 1
                if live.num_draft_losses >= MAX_DRAFT_LOSSES:
                    said = {"request_id": live.request_id}
                    logger.warning("a request goes on without a draft: it may have ended several", extra=said)
                    self._controller.observe_refusal(live.stats, is_final=True)
        self.on_moved()

    def on_moved(self) -> None:
        """Forgets what the draft held and owed: it is not to be had from the next one."""
        for live in self._running.values():
            if live.session.has_open_verdict:
                self._count_lookup(live, "draft_lost")
            live.session.lose_draft()
        self._waits.clear()

    def expire(self, now: float) -> list[LiveSession]:
        """Gives up a draft that is silent, and waits that took too long.

        Returns:
            Sessions that go on without a proposal in this round.
        """
        link = self.link
        # Also when the sessions that asked have ended: a draft answers all the same, and the next would wait.
        if (
            link is not None
            and link.unanswered_since is not None
            and now >= link.unanswered_since + self._settings.router.round_timeout_s
        ):
            self.on_lost(link, f"silent for round_timeout_s = {self._settings.router.round_timeout_s:g} s")
        self._prefill.expire(now, self._settings.router.round_timeout_s)
        given_up = self._waits.take_expired(now, self._patience_s())
        for live in given_up:
            if live.session.has_open_verdict:
                self._count_lookup(live, "timed_out")
            live.session.skip_draft()
            self._trace.draft_skipped(live.request_id)
        return given_up

    @property
    def next_due_s(self) -> float | None:
        """Time at which ``expire`` has something to do if nothing else happens."""
        oldest_s = self._waits.oldest_s
        dues = [] if oldest_s is None else [oldest_s + self._patience_s()]
        link = self.link
        if link is not None and link.unanswered_since is not None:
            dues.append(link.unanswered_since + self._settings.router.round_timeout_s)
        return min(dues, default=None)

    def _patience_s(self) -> float:
        return patience_s(self._budgets.patience_s(), self._settings, is_serial=self._controller.is_serial)

    def _plan(self, live: LiveSession, num_remaining: int, now: float) -> Plan:
        """The controller's plan, or no speculation where the draft cannot be asked."""
        link = self.link
        if link is None:
            if self._leases is not None and live.stats.fixed_k != 0:
                self._leases.want()
            return OFF_BY_REASON[Reason.FIXED if live.stats.fixed_k == 0 else Reason.NO_DRAFT]
        if (ref := live.session.request.adapter) is not None:
            live.session.draft.adapter = link.adapters.get(ref.name, b"")
        # Here and not in ``plan`` alone: with many sessions the way there counts too.
        resting = self._controller.resting_plan(live.stats, len(self._running))
        if resting is not None:
            return resting
        if link.unanswered_since is not None and now >= link.unanswered_since + self._patience_s():
            return OFF_BY_REASON[Reason.STALLED]
        num_running, unread = len(self._running), live.num_unread
        plan = self._controller.plan(
            live.stats, num_remaining=num_remaining, num_running=num_running, num_unread=unread
        )
        longest = len(live.session.committed) + 2 * (plan.num_speculative_tokens + 1)
        return plan if plan.is_off or longest <= link.info.max_model_len else OFF_BY_REASON[Reason.TOO_LONG]

    def _ask(self, session: Session, plan: Plan, now: float) -> None:
        self._push(session.proposal_item(plan.num_speculative_tokens, plan.min_acceptance, plan.tree), now)

    def _push(self, item: SpeculateItem, now: float) -> None:
        assert self.link is not None
        self._features.note(item)
        self.link.push(item, now)
        self._trace.draft_asked(item)
