"""Time of simulated engines: how long they work, and how much they slow each other down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from specray.engine_info import EngineInfo
from specray.types import SpeculateItem, UnknownSequence, VerifyItem


@dataclass(slots=True)
class Busy:
    """Working time of an engine, for its utilisation."""

    seconds: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0
    num_steps: int = 0

    def work(self, start_s: float, end_s: float) -> None:
        """Adds one step; steps of an engine do not overlap."""
        self.seconds += end_s - start_s
        self.since_s, self.until_s = start_s, end_s
        self.num_steps += 1

    def worked_s(self, now: float) -> float:
        """Returns the seconds worked before ``now``: a step is counted when it is sent."""
        return self.seconds - max(0.0, self.until_s - max(now, self.since_s))

    def lost_s(self, since_s: float, now: float, slowdown: float) -> float:
        """Returns the seconds that another engine on the same hardware has lost.

        This engine had worked ``since_s`` seconds then; meanwhile the other is ``slowdown`` times slower.
        """
        return (self.worked_s(now) - since_s) * (1 - 1 / slowdown)

    def extend(self, seconds: float) -> None:
        self.seconds += seconds
        self.until_s += seconds


@dataclass(slots=True)
class SharedStep:
    """A step during which another engine on the same hardware may work."""

    seconds: float
    """Seconds of the step, as far as is known."""
    other_worked_s: float = 0.0
    """Seconds that the other engine had worked when the step began, or was last checked."""
    slowdown: float = 1.0
    """Factor by which the step is slower while the other engine works."""

    def make_up(self, own: Busy, other: Busy, now: float) -> float:
        """Returns by how many seconds the other engine's work since the last check delays the step.

        0 means that the step has ended. What the other does in the additional time is known only then.
        """
        lost_s = min(self.seconds, other.lost_s(self.other_worked_s, now, self.slowdown))
        self.other_worked_s = other.worked_s(now)
        # Shortest delay in seconds that is made up for.
        if lost_s <= 1e-6:
            return 0.0
        own.extend(lost_s)
        self.seconds += lost_s
        return lost_s


@dataclass(slots=True)
class Held:
    """One sequence of a simulated engine, which stores lengths in place of tokens."""

    length: int = 0
    num_prompt: int = 0
    num_blocks: int = 0
    num_confirmed: int = 0
    """Draft tokens that were accepted in the last step, and so are computed already."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens, where prefixes are found; else empty."""
    finds: bool = False
    """All tokens so far were found in the prefix cache, so more may be."""


def unknown(item: SpeculateItem | VerifyItem, held: Held | None) -> UnknownSequence | None:
    """The answer to an item that continues more tokens than are held; None: it does not."""
    if item.base_len > (0 if held is None else held.length):
        return UnknownSequence(item.request_id, item.round_id, item.base_len)
    return None


class SimulatedEngine:
    """What a simulated target and a simulated draft share.

    Args:
        info: limits.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.busy = Busy()
        self.beside: Busy | None = None
        """Working time of the other engine on this hardware; None: there is none."""

    def run_step(
        self, start_s: float, seconds: float, slowdown: float, on_end: Callable[[float], object]
    ) -> None:
        """Works from ``start_s`` on; at the end calls ``on_end`` with the seconds that the step has taken.

        Args:
            seconds: of the step alone; it takes longer where the other engine works meanwhile.
            slowdown: factor by which it is slower then.
        """
        loop = asyncio.get_running_loop()
        self.busy.work(start_s, start_s + seconds)
        worked_s = 0.0 if self.beside is None else self.beside.worked_s(loop.time())
        shared = SharedStep(seconds, worked_s, slowdown)

        def end() -> None:
            if self.beside and (lost_s := shared.make_up(self.busy, self.beside, loop.time())):
                loop.call_later(lost_s, end)
            else:
                on_end(shared.seconds)

        loop.call_at(start_s + seconds, end)
