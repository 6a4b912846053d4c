"""The way of a call from its body to a router: a few at a time, and counted as if they had arrived.

Letting a call in takes milliseconds (its body is looked into, its prompt tokenised, a router asked), refusing
one a fraction of that. With hundreds on the way at once every turn of the event loop would be as long as a
step of all of them together, and a refusal, which takes three turns, would wait for that.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Final

MOST_AT_ONCE: Final = 2
"""Somebody may wait for something (what the model allows is asked of a router, once)."""
LONGEST_WAIT_S: Final = 2.0
"""Whoever has waited so long goes in all the same: a router that is not there may hold up those before."""


class Entrance:
    """Where calls queue up before the application."""

    def __init__(self, *, most_at_once: int = MOST_AT_ONCE, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._places = asyncio.Semaphore(most_at_once)
        self._longest_wait_s = longest_wait_s
        self.num_calls = 0
        """That wait, or are on their way."""

    @property
    def num_others(self) -> int:
        """The same without the call that the running task belongs to."""
        passage = _PASSAGE.get()
        is_ours = passage is not None and passage.is_through(self)
        return self.num_calls - 1 if is_ours else self.num_calls

    async def enter(self) -> Passage:
        """Waits for a turn, first come, first served. The passage is to be left, whatever happens."""
        self.num_calls += 1
        has_place = False
        try:
            async with asyncio.timeout(self._longest_wait_s):
                has_place = await self._places.acquire()
        except TimeoutError:
            pass
        except BaseException:
            self.num_calls -= 1
            raise
        passage = Passage(self, has_place=has_place)
        _PASSAGE.set(passage)
        return passage

    def leave(self, *, has_place: bool) -> None:
        """Called by a passage, once."""
        self.num_calls -= 1
        if has_place:
            self._places.release()


class Passage:
    """One call on its way."""

    def __init__(self, entrance: Entrance, *, has_place: bool) -> None:
        self._entrance: Entrance | None = entrance
        self._has_place = has_place

    def is_through(self, entrance: Entrance) -> bool:
        """It is on its way there."""
        return self._entrance is entrance

    def leave(self) -> None:
        """It has arrived, or was refused; idempotent."""
        entrance, self._entrance = self._entrance, None
        if entrance is not None:
            entrance.leave(has_place=self._has_place)


_PASSAGE: ContextVar[Passage | None] = ContextVar("passage", default=None)


def arrive() -> None:
    """The call that the running task belongs to goes to a router now."""
    passage = _PASSAGE.get()
    if passage is not None:
        passage.leave()
