"""Limits how many calls an ingress prepares at a time, and counts those that wait for their turn.

To prepare a call (read its body, tokenise its prompt, ask a router) takes milliseconds; to refuse one takes a
fraction of that. If hundreds were prepared at once, every turn of the event loop would last as long as one
step of all of them, and a refusal, which takes three turns, would wait for that.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Final

MAX_CALLS: Final = 2
"""Calls prepared at a time; two, because one may wait for the router's first answer about the model."""
MAX_WAIT_S: Final = 2.0
"""Longest wait for a turn in seconds. After that a call goes ahead: those before it may wait for a router
that is gone."""


class CallLimiter:
    """Lets calls through first come, first served, a few at a time."""

    def __init__(self, *, max_calls: int = MAX_CALLS, max_wait_s: float = MAX_WAIT_S) -> None:
        self._places = asyncio.Semaphore(max_calls)
        self._max_wait_s = max_wait_s
        self.num_calls = 0
        """Calls that wait or are being prepared."""

    @property
    def num_others(self) -> int:
        """The same number without the call of the running task."""
        slot = _SLOT.get()
        is_ours = slot is not None and slot.is_held_at(self)
        return self.num_calls - 1 if is_ours else self.num_calls

    async def enter(self) -> CallSlot:
        """Waits for a turn. The caller must leave the returned slot, whatever happens."""
        self.num_calls += 1
        has_place = False
        try:
            async with asyncio.timeout(self._max_wait_s):
                has_place = await self._places.acquire()
        except TimeoutError:
            pass
        except BaseException:
            self.num_calls -= 1
            raise
        slot = CallSlot(self, has_place=has_place)
        _SLOT.set(slot)
        return slot

    def free_place(self) -> None:
        self._places.release()

    def leave(self) -> None:
        self.num_calls -= 1


class CallSlot:
    """The turn of one call, from its body to a router."""

    def __init__(self, limiter: CallLimiter, *, has_place: bool) -> None:
        self._limiter: CallLimiter | None = limiter
        self._has_place = has_place

    def is_held_at(self, limiter: CallLimiter) -> bool:
        return self._limiter is limiter

    def step_aside(self) -> None:
        """Lets the next call in, since this one waits for threads; it still counts. Idempotent."""
        if self._limiter is not None and self._has_place:
            self._has_place = False
            self._limiter.free_place()

    def leave(self) -> None:
        """Frees the slot: the call has reached a router, or was refused. Idempotent."""
        self.step_aside()
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.leave()


_SLOT: ContextVar[CallSlot | None] = ContextVar("slot", default=None)


def step_aside() -> None:
    """Lets the next call in before the running task's call waits for threads."""
    slot = _SLOT.get()
    if slot is not None:
        slot.step_aside()


def release_slot() -> None:
    """Frees the slot of the running task's call, which goes to a router now."""
    slot = _SLOT.get()
    if slot is not None:
        slot.leave()
