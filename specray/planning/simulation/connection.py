"""What simulated engines have in common: replies on their way, and how long an engine has worked."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from specray.errors import EngineLostError
from specray.types import DraftReplies, TargetReplies

RepliesT = TypeVar("RepliesT", DraftReplies, TargetReplies)

_LEAST_S = 1e-6
"""Less than this is not made up for."""


class Mailbox(Generic[RepliesT]):
    """Replies that have arrived, and whether more can."""

    def __init__(self) -> None:
        self._arrived: deque[RepliesT] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, replies: RepliesT) -> None:
        self._arrived.append(replies)
        self._wake.set()

    async def get(self) -> RepliesT:
        while not self._arrived:
            if self._is_closed:
                raise EngineLostError("the simulated connection was closed")
            self._wake.clear()
            await self._wake.wait()
        return self._arrived.popleft()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()


@dataclass(slots=True)
class Busy:
    """How long an engine has worked, for its utilisation."""

    seconds: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0
    num_steps: int = 0

    def work(self, start_s: float, end_s: float) -> None:
        """One step; steps of an engine do not overlap."""
        self.seconds += end_s - start_s
        self.since_s, self.until_s = start_s, end_s
        self.num_steps += 1

    def worked_s(self, now: float) -> float:
        """Of ``seconds``, those before ``now``: a step is counted when it is sent."""
        return self.seconds - max(0.0, self.until_s - max(now, self.since_s))

    def lost_s(self, since_s: float, now: float, slowdown: float) -> float:
        """What another engine on the same hardware is behind with, that has worked since this one had worked
        ``since_s`` and gets on so many times slower beside it."""
        return (self.worked_s(now) - since_s) * (1 - 1 / slowdown)

    def extend(self, seconds: float) -> None:
        """The last step takes so much longer."""
        self.seconds += seconds
        self.until_s += seconds


@dataclass(slots=True)
class SharedStep:
    """A step that may be beside another engine's, on the same hardware."""

    seconds: float
    """What it takes, as far as is known."""
    other_worked_s: float = 0.0
    """What the other engine had worked when the step began, or was looked at last."""
    slowdown: float = 1.0
    """While the other works."""

    def make_up(self, own: Busy, other: Busy, now: float) -> float:
        """What the step takes longer for what the other did since it was looked at last; 0: it has ended.

        What the other does in that time is known only then.
        """
        lost_s = min(self.seconds, other.lost_s(self.other_worked_s, now, self.slowdown))
        self.other_worked_s = other.worked_s(now)
        if lost_s <= _LEAST_S:
            return 0.0
        own.extend(lost_s)
        self.seconds += lost_s
        return lost_s
