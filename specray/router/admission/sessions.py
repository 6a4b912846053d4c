"""Decides who runs and who waits: admission, preemption, deadlines and ends of sessions."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from functools import partial

from specray.errors import (
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    SpecrayError,
)
from specray.interfaces import RequestTracer
from specray.router.admission.adapters import AdapterRoom
from specray.router.admission.queue import AdmissionQueue
from specray.router.admission.quotas import Quotas
from specray.router.admission.service_levels import ServiceLevels, attained
from specray.router.deferred import Later
from specray.router.live_session import LiveSession
from specray.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Seconds after which a session that found no room on an idle target tries again."""
MAX_TARGET_LOSSES = 3


class Sessions:
    """All requests between arrival and end. Ending one is one call, wherever it stands."""

    def __init__(
        self,
        queue: AdmissionQueue[LiveSession],
        metrics: RouterMetrics,
        release: Callable[[str], None],
        later: Later,
        tracer: RequestTracer | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        self._tracer = tracer
        self._adapters = adapters
        self.running: dict[str, LiveSession] = {}
        self.levels = ServiceLevels(self.running, on_change=metrics.service_level_yield.set)
        """Service levels of those that run."""
        self.queue = queue
        """Sessions that wait."""
        self._metrics = metrics
        self._release = release
        self._later = later
        self._all: dict[str, LiveSession] = {}
        self._quotas = Quotas()
        self._by_deadline: list[tuple[float, str]] = []
        """A heap of (deadline, request_id); some of them have ended."""
        self._max_running = 1
        self._limit = 1
        self._retry_at_s: float | None = None
        self._ended_s: float | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(self._all.values())

    @property
    def num_queued(self) -> int:
        return len(self.queue)

    def load(self) -> dict[str, float]:
        """How much there is to do: the share of the places that is taken, and prompt tokens that wait."""
        return {
            "occupancy": len(self.running) / self._limit,
            "queued_tokens": float(self.queue.num_tokens),
        }

    @property
    def limit(self) -> int:
        """Most sequences that the target holds at once."""
        return self._limit

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are not computed yet, of those that wait and of those that run."""
        running = sum(live.num_missing for live in self.running.values() if live.is_prefilling)
        return self.queue.num_tokens + running

    @property
    def next_due_s(self) -> float | None:
        """Time at which ``expire`` or ``admit`` has something to do even if nothing else happens."""
        first = self._first_to_expire()
        deadline = None if first is None else first.deadline_s
        if self._retry_at_s is None or not self.queue.has_next:
            return deadline
        return self._retry_at_s if deadline is None else min(deadline, self._retry_at_s)

    def set_limit(self, max_num_seqs: int) -> None:
        """The target holds ``limit`` sequences at once."""
        self._limit = self._max_running = max_num_seqs

    def submit(self, live: LiveSession, now: float) -> None:
        """Takes a new request; a full queue may refuse another one for it.

        One that another router had let in goes first, and bounds do not apply: its caller has begun to read.

        Raises:
            OverloadedError: there is no room; nothing was changed.
        """
        num_free_places = max(0, self._max_running - len(self.running))
        displaced: list[LiveSession] = []
        try:
            if live.is_resumed:
                self._metrics.resumed.inc()
                self.queue.push_front(live)
            else:
                self._quotas.check(live.session.request)
                displaced = self.queue.push(live, num_free_places=num_free_places)
        except OverloadedError:
            self._metrics.refused.inc()
            raise
        self._all[live.request_id] = live
        self._quotas.take(live.session.request)
        self._remember_deadline(live)
        for other in displaced:
            self._metrics.refused.inc()
            reason = "the queue is full, and others have less of it or are more urgent"
            self._fail(other, OverloadedError(reason, self.queue.retry_after_s()), now)
        # It may be long until anybody is let in.
        self._show()

    def admit(self, now: float, *, least_s: float = 0.0) -> None:
        """Moves requests from the queue to the running ones while there are places.

        Args:
            least_s: what cannot be answered sooner than this is not begun when its deadline is sooner.
        """
        if self._retry_at_s is not None and now < self._retry_at_s:
            return
        self._retry_at_s = None
        if self._adapters is not None and self._adapters.take_change():
            self.queue.call_back()
        if not self.queue.has_next:
            return
        while self.queue.has_next and len(self.running) < self._max_running:
            live = self.queue.pop()
            if live.deadline_s <= now + least_s:
                if live.admitted_s is None:
                    self._settle(live, 0)
                self._expire(live, now)
                continue
            if not self._has_adapter(live, now):
                continue
            self.running[live.request_id] = live
            if live.admitted_s is None:
                live.admitted_s = now
                self._quotas.let_in(live.session.request)
                self._metrics.prompt_tokens.inc(live.session.num_prompt_tokens)
        if self._adapters is not None and not self.queue.has_returned:
            self._adapters.end_look()
        self._show()

    def _has_adapter(self, live: LiveSession, now: float) -> bool:
        """Whether its adapter is loaded; else it waits aside, or has ended."""
        if self._adapters is None:
            return True
        try:
            if self._adapters.lets_in(live.session.request, is_begun=live.admitted_s is not None):
                return True
            self.queue.set_aside(live)
        except InvalidRequestError as error:
            if live.admitted_s is None:
                self._settle(live, 0)
            self._fail(live, error, now)
        return False

    def lose_adapter(self, live: LiveSession, now: float) -> None:
        """The target does not have its adapter: the session waits until it does."""
        if self._adapters is not None:
            self._adapters.forget(live.session.request.sampling.adapter)
        self._put_back(live)

    def preempt(self, live: LiveSession, now: float) -> None:
        """The target had no room: the session gives back what it holds and goes first when others ended."""
        self._put_back(live)
        self._max_running = max(1, len(self.running))
        if not self.running:
            self._retry_at_s = now + RETRY_S

    def _put_back(self, live: LiveSession) -> None:
        del self.running[live.request_id]
        self._release(live.request_id)
        live.session.lose_target()
        live.session.lose_draft()
        live.timer.stop()
        self.queue.push_front(live)
        live.num_preemptions += 1
        self._metrics.preemptions.inc()
        self._show()

    def lose_target(self, now: float) -> None:
        """No session is held any more, and what found no room may find it in the next target at once.

        A session that has been part of the last step of MAX_TARGET_LOSSES targets in a row, of the last one
        alone (``suspect``), is ended: it would take every target with it, and all others wait for each.
        """
        self._retry_at_s = None
        for live in list(self.running.values()):
            live.num_target_losses += live.session.target.in_flight is not None
            live.session.lose_target()
            live.timer.stop()
            if live.num_target_losses >= MAX_TARGET_LOSSES:
                said = {"request_id": live.request_id}
                logger.error(
                    "a request is ended: %d targets were lost with it", MAX_TARGET_LOSSES, extra=said
                )
                reason = f"{MAX_TARGET_LOSSES} targets were lost while they worked on this request"
                self._fail(live, SpecrayError(reason), now)

    def suspect(self) -> LiveSession | None:
        """A session that may be what ended the last targets: the next step is its alone, to find out."""
        most = MAX_TARGET_LOSSES - 1
        return next((live for live in self.running.values() if live.num_target_losses >= most), None)

    def end(self, live: LiveSession, now: float) -> None:
        """The session has a finish reason: both engines forget the request, then the caller gets it, or the
        session's error."""
        session = live.session
        assert session.finish_reason is not None
        if not self._forget(live, now):
            return
        if session.error is not None:
            live.delivery.fail(session.error)
            self._metrics.observe_end(session.finish_reason.value)
            return
        self._later.add(self._metrics.observe_end, session.finish_reason.value)
        for kind, is_kept in attained(live):
            self._later.add(self._metrics.observe_level, kind, is_kept)
        finish = partial(
            live.delivery.finish,
            session.finish_reason,
            stop_reason=session.stop_reason,
            stats=session.tally.stats,
            num_cached_tokens=session.num_cached_tokens,
            ttft_s=None if live.first_token_s is None else live.first_token_s - live.arrived_s,
            prompt_logprobs=session.prompt_scores.logprobs,
        )
        self._later.add(finish)

    def abort(self, request_id: str, now: float) -> None:
        """The caller went away. Unknown ids are ignored."""
        live = self._all.get(request_id)
        if live is not None:
            live.session.abort()
            self.end(live, now)

    def expire(self, now: float) -> None:
        """Ends what took longer than it may, queued or running."""
        while (live := self._first_to_expire()) is not None and live.deadline_s <= now:
            self._expire(live, now)

    def fail_all(self, error: EngineLostError, now: float) -> None:
        """Every caller gets ``error``."""
        for live in list(self._all.values()):
            self._fail(live, error, now)

    def _expire(self, live: LiveSession, now: float) -> None:
        num_tokens = live.session.num_output_tokens
        progress = f"after {num_tokens} tokens" if num_tokens else "before its first token"
        seconds = live.deadline_s - live.arrived_s
        self._metrics.expired.inc()
        self._fail(live, DeadlineExceededError(f"the time of {seconds:g} s ended {progress}"), now)

    def _fail(self, live: LiveSession, error: SpecrayError, now: float) -> None:
        """The caller gets an exception."""
        live.session.fail(error)
        self.end(live, now)

    def _first_to_expire(self) -> LiveSession | None:
        while self._by_deadline:
            deadline_s, request_id = self._by_deadline[0]
            live = self._all.get(request_id)
            # The id of a request that ended may be in use again, with another deadline.
            if live is not None and live.deadline_s == deadline_s:
                return live
            heapq.heappop(self._by_deadline)
        return None

    def _remember_deadline(self, live: LiveSession) -> None:
        heapq.heappush(self._by_deadline, (live.deadline_s, live.request_id))
        if len(self._by_deadline) > max(64, 2 * len(self._all)):
            # Long deadlines of requests that ended soon would pile up.
            self._by_deadline = [(other.deadline_s, name) for name, other in self._all.items()]
            heapq.heapify(self._by_deadline)

    def _forget(self, live: LiveSession, now: float) -> bool:
        if self._all.pop(live.request_id, None) is None:
            return False
        was_let_in = live.admitted_s is not None
        self._quotas.release(live.session.request, was_let_in=was_let_in)
        self.queue.remove(live.request_id)
        if was_let_in:
            # Also when it waits again: it is charged once, when it is let in first.
            self._settle(live, len(live.session.committed))
        if self.running.pop(live.request_id, None) is not None:
            self._release(live.request_id)
            self._observe_service(now)
            # What one session left has room for another.
            self._max_running = min(self._limit, self._max_running + 1)
        if not self.queue:
            # Nobody waits for room, also when who waited has left.
            self._max_running = self._limit
        self._show()
        if self._adapters is not None:
            self._adapters.on_end(live.adapter)
        if self._tracer is not None and live.session.request.traceparent:
            self._tracer.request_ended(live.life(now), now)
        return True

    def _settle(self, live: LiveSession, num_tokens: int) -> None:
        # A resumed request was charged by the router that was lost.
        if not live.is_resumed:
            self.queue.settle(live, num_tokens)

    def _observe_service(self, now: float) -> None:
        if self._ended_s is not None:
            self.queue.observe_service(now - self._ended_s)
        self._ended_s = now

    def _show(self) -> None:
        self._metrics.queued_requests.set(len(self.queue))
        self._metrics.queued_tokens.set(self.queue.num_tokens)
        self._metrics.running_sessions.set(len(self.running))
