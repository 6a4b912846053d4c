"""Chooses the sessions of the next target step, and holds an idle target back for late proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specray.control.cost_model import CostModel
from specray.engine_info import EngineInfo
from specray.router.admission.service_levels import ServiceLevels
from specray.router.admission.sessions import Sessions
from specray.router.draft_model.budgets import MIN_PREFILL_TOKENS, Budgets
from specray.router.draft_model.prefill import are_prompts_first
from specray.router.live_session import LiveSession
from specray.router.settings import Settings


class Schedulable(Protocol):
    """What the batch needs to know of a session that could be verified now."""

    @property
    def is_prefilling(self) -> bool: ...

    @property
    def num_missing(self) -> int:
        """Committed tokens that the target lacks, >= 1."""
        ...

    @property
    def num_drafted(self) -> int:
        """Draft tokens in hand."""
        ...

    @property
    def last_step(self) -> int:
        """Number of the target step that it was last part of."""
        ...


class Share(NamedTuple):
    """How a session takes part: where it stands in what was offered, and its room in the step."""

    position: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one target step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    """Prompt tokens of all prefills together."""


def form_batch(offered: Sequence[Schedulable], limits: BatchLimits) -> list[Share]:
    """Chooses for one step: running sessions first, then chunks of prefills while there is room.

    Running sessions that do not fit take turns: those longest without a step go first. Prefills are served
    first come, first served, one chunk budget for all, so that running sessions keep their pace.

    Args:
        offered: sessions that could be verified now, in order of arrival.
        limits: bounds of the step.

    Returns:
        At most max_num_seqs shares; their rooms add up to at most max_num_batched_tokens.
    """
    shares: list[Share] = []
    left = limits.max_num_batched_tokens
    # Properties of a session are asked once: this is part of every step.
    prefilling: list[int] = []
    running: list[tuple[int, int]] = []
    for index, session in enumerate(offered):
        if session.is_prefilling:
            prefilling.append(index)
        else:
            running.append((index, session.num_missing + session.num_drafted))
    if len(running) > limits.max_num_seqs or sum(num_rows for _, num_rows in running) > left:
        running.sort(key=lambda entry: offered[entry[0]].last_step)
    for index, num_rows in running:
        if len(shares) == limits.max_num_seqs or left <= 0:
            break
        room = min(left, num_rows)
        shares.append(Share(index, room))
        left -= room
    chunk_left = min(limits.prefill_chunk_tokens, left)
    for index in prefilling:
        session = offered[index]
        if len(shares) == limits.max_num_seqs or chunk_left <= 0:
            break
        num_prompt = min(chunk_left, session.num_missing)
        is_last = num_prompt == session.num_missing
        room = min(left, num_prompt + session.num_drafted) if is_last else num_prompt
        shares.append(Share(index, room))
        left -= room
        chunk_left = min(chunk_left - num_prompt, left)
    return shares


def of_few_adapters(ready: list[LiveSession], most: int) -> list[LiveSession]:
    """The sessions of ``ready`` for one step with at most ``most`` adapters; those without take part.

    All sessions of an adapter go together. Adapters take turns: those of which a session is longest without a
    step go first.
    """
    last_step: dict[bytes, int] = {}
    for live in ready:
        if live.adapter:
            last_step[live.adapter] = min(live.last_step, last_step.get(live.adapter, live.last_step))
    if len(last_step) <= most:
        return ready
    chosen = {b"", *sorted(last_step, key=last_step.__getitem__)[:most]}
    return [live for live in ready if live.adapter in chosen]


GRACE_SHARE = 0.25
"""Share of its own step for which an idle target waits for late proposals when others could go."""
ESTABLISHED_TOKENS = 32
"""Output tokens from which somebody reads along: prompts of others must not stall the session."""


class StepScheduler:
    """Chooses the sessions of the next target step.

    Args:
        max_adapters: most different adapters in a step; None: any number.
        hold_until: called with the time at which an idle target that is held back is looked at again.
    """

    def __init__(
        self,
        sessions: Sessions,
        cost_model: CostModel,
        budgets: Budgets,
        settings: Settings,
        *,
        levels: ServiceLevels,
        max_adapters: int | None = None,
        hold_until: Callable[[float], None],
    ) -> None:
        self._sessions = sessions
        self._cost_model = cost_model
        self._budgets = budgets
        self._settings = settings
        self._levels = levels
        self._max_adapters = max_adapters
        self._hold_until = hold_until

    def schedule(
        self, info: EngineInfo, *, step: int, now: float, idle_since_s: float | None
    ) -> list[tuple[LiveSession, int]]:
        """Chooses the next target step, as (session, room) pairs; empty: nothing to do yet.

        Stragglers: while some sessions could go and others wait for the draft, an idle target holds back for
        at most GRACE_SHARE of its usual step. A proposal that comes in that time rides along at no cost to
        anybody; a later one misses this step and takes part in the next. So nobody is delayed by another's
        draft for more than that share, and a straggler's own wait ends with its patience.

        Args:
            info: limits of the target.
            step: number of the step.
            now: seconds on the router's clock.
            idle_since_s: time since when the target has had nothing to do; None: it is not held back.
        """
        suspect = self._sessions.suspect()
        if suspect is not None:
            # Neither has it anything in flight after a loss, nor does it wait for a draft: it begins anew.
            return self._shared_out([suspect], info)
        ready: list[LiveSession] = []
        has_stragglers = False
        for live in self._sessions.running.values():
            session = live.session
            if session.target.in_flight is not None:
                continue
            if session.drafted is not None or session.is_prefilling:
                ready.append(live)
            else:
                has_stragglers = True
        if not ready or (has_stragglers and self._holds_back(ready, now, idle_since_s)):
            return []
        ready = self._levels.taking_part(ready, step)
        if self._max_adapters is not None:
            ready = of_few_adapters(ready, self._max_adapters)
        return self._shared_out(self._levels.first_tokens_first(ready), info)

    def _shared_out(self, ready: Sequence[LiveSession], info: EngineInfo) -> list[tuple[LiveSession, int]]:
        limits = BatchLimits(info.max_num_seqs, info.max_num_batched_tokens, self._prefill_room(ready))
        shares: list[Share] = form_batch(ready, limits)
        return [(ready[share.position], share.max_new_tokens) for share in shares]

    def _prefill_room(self, ready: Sequence[LiveSession]) -> int:
        """Prompt tokens of the step: few enough that the sessions which run keep their pace."""
        most = self._settings.router.prefill_chunk_tokens
        if not any(live.is_prefilling for live in ready):
            return most
        # Also those that wait for their draft: they would wait for this step next.
        running = [live for live in self._sessions.running.values() if not live.is_prefilling]
        is_burst = all(live.session.num_output_tokens < ESTABLISHED_TOKENS for live in running)
        if not running or (is_burst and are_prompts_first(self._sessions.running)):
            return most
        num_rows = sum(live.num_rows for live in running)
        if self._levels.spares_steps:
            most = min(most, MIN_PREFILL_TOKENS)
        max_slowdown = self._settings.router.max_prefill_slowdown
        return self._budgets.prefill_tokens(
            num_rows, most, max_slowdown=max_slowdown, num_running=len(running)
        )

    def _holds_back(self, ready: Sequence[LiveSession], now: float, idle_since_s: float | None) -> bool:
        """An idle target waits a little for sessions whose proposals are late."""
        if idle_since_s is None:
            return False
        step_s = self._cost_model.usual_verify_s(sum(live.num_rows for live in ready), len(ready))
        if step_s is None or now >= idle_since_s + GRACE_SHARE * step_s:
            return False
        self._hold_until(idle_since_s + GRACE_SHARE * step_s)
        return True
