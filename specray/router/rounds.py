"""The calls of a round: collect what happened, schedule, verify, commit. ``loops`` puts them in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from specray.control.controller import Controller
from specray.control.state import Plan
from specray.errors import ProtocolError
from specray.interfaces import Clock
from specray.router.admission.sessions import Sessions
from specray.router.choice import ProposerChoice
from specray.router.deferred import Later
from specray.router.draft_model.budgets import Budgets
from specray.router.first_tokens import FirstTokens
from specray.router.in_flight import VerifyInFlight
from specray.router.live_session import LiveSession
from specray.router.scheduler import StepScheduler
from specray.router.session.values import Commit
from specray.router.settings import Settings
from specray.router.trace import Trace
from specray.router.transport.clock import Alarm
from specray.router.transport.links import (
    DraftMoved,
    DraftRepliesArrived,
    Inbox,
    LinkLost,
    TargetLink,
    TargetRepliesArrived,
)
from specray.telemetry.metrics import RouterMetrics
from specray.types import DraftKind, ItemFailed, TargetReplies, TargetReply, UnknownSequence, Verdict

logger = logging.getLogger(__name__)


class Rounds:
    """Everything that both loops do; synchronous, between two looks into the inbox."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        proposers: ProposerChoice,
        controller: Controller,
        inbox: Inbox,
        settings: Settings,
        max_adapters: int | None,
        clock: Clock,
        metrics: RouterMetrics,
        later: Later,
        on_target_lost: Callable[[TargetLink, Exception], None],
        trace: Trace,
    ) -> None:
        self.sessions = sessions
        self.proposers = proposers
        self.is_open = True
        self.target: TargetLink | None = None
        """Link to the target; None while it is lost. Set by ``connect``."""
        self.last_verdict_s: float | None = None
        self._controller = controller
        self._usual_verify_s = controller.cost_model.usual_verify_s
        self._inbox = inbox
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._later = later
        self._on_target_lost = on_target_lost
        self._trace = trace
        self._alarm = Alarm(clock, inbox.wake)
        self._scheduler = StepScheduler(
            sessions,
            controller.cost_model,
            Budgets(controller.cost_model, max_k=lambda: controller.max_k),
            settings,
            levels=sessions.levels,
            max_adapters=max_adapters,
            hold_until=self._alarm.set,
        )
        self._first_tokens = FirstTokens()
        self._num_steps = 0
        self._idle_since_s: float | None = None
        self._step_ended_s: float | None = None
        self._num_committed = 0
        """Tokens, since then."""
        self._now = clock.monotonic()

    async def wait(self, verifying: VerifyInFlight | None) -> None:
        """Waits until something happened or is due; what was put off is done meanwhile."""
        if self._later:
            # The links' writers run first: they were woken before.
            await asyncio.sleep(0)
            self._later.run()
        self._set_alarm(verifying)
        await self._inbox.wait()

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self.is_open = False
        self.wake()

    def settle(self) -> None:
        """Does what was put off, at the end of the loop: callers wait for some of it."""
        while self._later:
            try:
                self._later.run()
            except Exception:
                logger.exception("what was put off failed")

    def connect(self, link: TargetLink) -> None:
        """Goes on with a target, the first one or the next after a loss."""
        self.target = link
        self._inbox.wake()

    def cancel_alarm(self) -> None:
        self._alarm.cancel()

    @property
    def is_serial(self) -> bool:
        """Draft and target are to take turns."""
        return self._controller.is_serial

    # What happened

    def collect(self, verifying: VerifyInFlight | None) -> VerifyInFlight | None:
        """Applies everything that happened. Returns ``verifying`` while it is still in flight."""
        self._now = now = self._clock.monotonic()
        for event in self._inbox.drain():
            match event:
                case TargetRepliesArrived():
                    if event.link is self.target:
                        self._on_target_replies(event.replies, verifying)
                case DraftRepliesArrived():
                    self.proposers.on_replies(event.link, event.replies, now)
                case DraftMoved():
                    self.proposers.model.on_moved()
                case LinkLost(link, error):
                    if isinstance(link, TargetLink):
                        self._lose_target(link, error)
                    else:
                        self.proposers.model.on_lost(link, error)
        self.sessions.expire(now)
        if verifying is not None and now >= verifying.sent_s + self._settings.router.verify_timeout_s:
            timeout = f"silent for verify_timeout_s = {self._settings.router.verify_timeout_s:g} s"
            self._lose_target(verifying.link, TimeoutError(timeout))
        if verifying is not None and (verifying.link is not self.target or not verifying.pending):
            verifying = None
        self.proposers.expire(now)
        return verifying

    def _on_target_replies(self, replies: TargetReplies, verifying: VerifyInFlight | None) -> None:
        for reply in replies.replies:
            if verifying is not None:
                verifying.pending.discard((reply.request_id, reply.round_id))
            live = self.sessions.running.get(reply.request_id)
            if live is None or not self._take(live, reply, replies):
                self._metrics.late_replies.labels("target").inc()
        if verifying is not None and not verifying.pending:
            forward_s = replies.forward_ns / 1e9
            # What the target had computed before it was asked took its time all the same.
            since_s = forward_s if self._step_ended_s is None else self._now - self._step_ended_s
            elapsed_s = max(self._now - verifying.sent_s, min(forward_s, since_s))
            self._end_step(verifying)
            self._later.add(self._metrics.verify_forward_s.observe, forward_s)
            num_rows = verifying.num_rows if replies.num_rows is None else replies.num_rows
            if num_rows:
                self._controller.cost_model.target.add(
                    num_rows,
                    elapsed_s,
                    is_overlapped=verifying.is_overlapped,
                    num_sequences=len(verifying.sessions),
                    num_context_tokens=verifying.num_context_tokens,
                    num_experts=replies.num_experts,
                    num_branches=verifying.num_branches,
                    # Of a prompt on the same machine too, it may be.
                    has_prompt=verifying.has_prompt or verifying.has_draft_prefill,
                )
            self._idle_since_s = self._now

    def _end_step(self, verifying: VerifyInFlight) -> None:
        # After a pause or a loss comes a step with prompts, which shows nothing of speculation.
        began_s, self._step_ended_s = self._step_ended_s, self._now
        self._controller.modes.end_step(
            None if began_s is None or verifying.has_prompt else self._now - began_s,
            is_reading=verifying.has_draft_prefill,
            num_sessions=len(verifying.sessions),
            num_running=verifying.num_running,
            num_tokens=self._num_committed,
        )
        self._num_committed = 0

    def _take(self, live: LiveSession, reply: TargetReply, replies: TargetReplies) -> bool:
        session = live.session
        match reply:
            case Verdict():
                try:
                    commit = session.on_verdict(reply)
                except ProtocolError as error:
                    said = {"request_id": reply.request_id}
                    logger.error("the target broke the protocol: %s", error, extra=said)
                    session.fail(ProtocolError(f"the target broke the protocol: {error}"))
                    self.sessions.end(live, self._now)
                    return True
                if commit is not None:
                    # Also of a chunk of a prompt, which commits nothing.
                    self.last_verdict_s = self._now
                    self._trace.verdict_received(reply, commit, replies, live.round_plan)
                    self._deliver(live, commit, replies.forward_ns / 1e9)
                return commit is not None
            case UnknownSequence() | ItemFailed():
                is_taken = session.on_target_refused(reply)
                if session.is_finished:
                    self.sessions.end(live, self._now)
                elif is_taken and isinstance(reply, ItemFailed):
                    put_back = self.sessions.lose_adapter if reply.lacks_adapter else self.sessions.preempt
                    put_back(live, self._now)
                return is_taken

    def _deliver(self, live: LiveSession, commit: Commit, forward_s: float) -> None:
        if not commit.token_ids:
            return
        now = self._now
        self._num_committed += len(commit.token_ids)
        self._measure(live, commit, forward_s)
        live.committed_s = now
        live.num_target_losses = 0
        # Whoever is woken by it would run before the links' writers.
        self._later.add(live.delivery.push, commit.token_ids, commit.logprobs, live.take_reports())
        if live.session.is_finished:
            self.sessions.end(live, now)
        else:
            self.proposers.on_lookup(live, commit.lookup, now)

    def _measure(self, live: LiveSession, commit: Commit, forward_s: float) -> None:
        self.proposers.on_commit(live, commit)
        since_s = live.committed_s
        overhead_s = live.timer.end(self._now, forward_s)
        if since_s is None:
            live.first_token_s, live.num_first_tokens = self._now, len(commit.token_ids)
            overhead_s = None
        else:
            live.pace(len(commit.token_ids), self._now - since_s)
            is_own = not commit.num_draft_tokens or commit.source == DraftKind.MODEL
            self._controller.observe_pace(
                live.stats,
                len(commit.token_ids),
                self._now - since_s,
                num_running=len(self.sessions.running),
                plan=live.round_plan if is_own else None,
            )
        # One call for all that is counted: keeping a call costs more than counting does.
        waited_s = self._now - (live.arrived_s if since_s is None else since_s)
        self._later.add(self._count, commit, live.round_plan, waited_s, since_s is None, overhead_s)
        if (ref := live.session.request.adapter) is not None:
            counted = len(commit.token_ids), commit.num_draft_tokens, commit.num_kept_tokens
            self._later.add(self._metrics.adapters.observe, ref.name, *counted)

    def _count(
        self, commit: Commit, plan: Plan, waited_s: float, is_first: bool, overhead_s: float | None
    ) -> None:
        """Counts a verdict that came ``waited_s`` after the last tokens, or after the request."""
        metrics, num_tokens = self._metrics, len(commit.token_ids)
        metrics.observe_round(commit.num_draft_tokens, commit.num_kept_tokens, commit.source)
        if commit.num_draft_tokens and (drafter := self._feature_drafter(commit.source)):
            self._first_tokens.observe(drafter, commit.num_chain_accepted)
        metrics.observe_plan(plan.overlap_label, plan.num_speculative_tokens, plan.reason)
        if is_first:
            metrics.observe_first_tokens(num_tokens, waited_s)
        else:
            metrics.observe_tokens(num_tokens, waited_s)
        if overhead_s is not None:
            metrics.round_overhead_s.observe(overhead_s)

    def _feature_drafter(self, source: str) -> str:
        """Name of the drafter of the target's features that has proposed; empty: something else has."""
        if self.target is None:
            return ""
        info = self.target.info
        names = {DraftKind.FEATURES.value: info.drafter, DraftKind.MODEL.value: info.feature_drafter}
        return names.get(source, "")

    def _lose_target(self, link: TargetLink, error: Exception) -> None:
        if link is not self.target:
            return
        self.target = None
        self._idle_since_s = None
        self._metrics.target_lost.inc()
        self.sessions.lose_target(self._now)
        self._on_target_lost(link, error)

    # What to do next

    def admit(self) -> None:
        """Lets waiting requests in while there are places and a target."""
        if self.target is not None and self.sessions.num_queued:
            # With nobody running, what is expected could be wrong for ever: nothing would correct it.
            step_s = self._usual_verify_s(1, 1) if self.sessions.running else None
            self.sessions.admit(self._now, least_s=step_s or 0.0)

    def propose(self) -> None:
        self.proposers.propose(self._now)

    def schedule(self, *, has_grace: bool) -> list[tuple[LiveSession, int]]:
        """Chooses the next target step, as (session, room) pairs; empty: nothing to do yet."""
        if self.target is None:
            return []
        idle_since_s = self._idle_since_s if has_grace else None
        return self._scheduler.schedule(
            self.target.info, step=self._num_steps + 1, now=self._now, idle_since_s=idle_since_s
        )

    def verify(self, batch: Sequence[tuple[LiveSession, int]]) -> VerifyInFlight:
        """Sends one target step."""
        assert self.target is not None
        now = self._now
        self._num_steps += 1
        self.sessions.levels.begin_step(now)
        pending: set[tuple[str, int]] = set()
        num_rows = num_context_tokens = num_branches = 0
        has_prompt = any(live.session.is_prefilling for live, _ in batch)
        for live, room in batch:
            self.proposers.model.ask_features(live)
            item = live.session.verify_item(room, is_plain_next=self.proposers.is_plain_next(live))
            live.runs_on = item.runs_on
            pending.add((item.request_id, item.round_id))
            num_new = min(room, len(item.token_ids) + len(item.draft.token_ids))
            num_rows += num_new
            num_context_tokens += item.base_len + num_new
            num_branches += len(item.draft.token_ids) - item.draft.depth
            self._trace.verify_sent(item, step=self._num_steps, num_rows=num_new)
            live.last_step, live.round_plan = self._num_steps, live.plan
            live.timer.start(now)
            self.target.push(item, now)
        self.target.flush()
        if self._idle_since_s is not None:
            self._later.add(self._metrics.target_idle_s.observe, now - self._idle_since_s)
            self._idle_since_s = None
        sessions = tuple(live for live, _ in batch)
        num_running = len(self.sessions.running)
        return VerifyInFlight(
            self.target,
            sessions,
            pending,
            num_rows,
            num_context_tokens,
            num_branches,
            has_prompt,
            now,
            num_running,
        )

    def draft_ahead(self, verifying: VerifyInFlight) -> None:
        verifying.is_overlapped = self.proposers.model.draft_ahead(verifying.sessions, self._now)

    def prefill_draft(self, verifying: VerifyInFlight | None) -> None:
        """Gives the draft what it has to prefill: prompts that the target prefills too, and what it lost."""
        if self.proposers.model.prefill(self._now, step=self._num_steps) and verifying is not None:
            verifying.has_draft_prefill = True

    def is_waiting_for_draft(self) -> bool:
        return any(live.session.is_waiting_for_draft for live in self.sessions.running.values())

    def flush(self) -> None:
        """Ends a step: sends what is left."""
        if self.target is not None:
            self.target.flush()
        self.proposers.model.flush()

    def _set_alarm(self, verifying: VerifyInFlight | None) -> None:
        """Sees to it that the next step is taken when something is due."""
        if not self.sessions.running:
            self._idle_since_s = None
        dues = [self.proposers.model.next_due_s, self.sessions.next_due_s]
        if verifying is not None:
            dues.append(verifying.sent_s + self._settings.router.verify_timeout_s)
        known = [due for due in dues if due is not None]
        if known:
            self._alarm.set(min(known))

    def release(self, request_id: str) -> None:
        """Frees a session on both engines, with the next flush."""
        if self.target is not None:
            self.target.release(request_id)
        self.proposers.model.release(request_id)
