"""Places of an Ingress for calls, over HTTP and gRPC together: who may send a body, and who is answered.

Every call goes the same way: its key, the limits of key and service, the size that its body says, the body,
a place among the calls that are answered. While its body comes, it takes none of these places: there may be
as many such calls again, and when there are, the oldest one of the key that has most goes for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

from specray.errors import DeadlineExceededError, OverloadedError
from specray.serving.admission.api_keys import Caller
from specray.serving.admission.fair_pool import Turn

BODY_TIMEOUT_S: Final = 60.0
"""Seconds to the end of a body."""
BODY_GRACE_S: Final = 10.0
"""Seconds that a body may take whatever its size; each byte that has come adds to them."""
_RETRY_AFTER_S: Final = 1.0

PartT = TypeVar("PartT")


class Places:
    """The calls of one Ingress.

    Args:
        max_calls: calls that are answered at a time, and calls whose bodies come.
        timeout_s: longest time of a call in seconds, from its first byte on.
        max_held_bytes: bytes of the bodies of all calls that are not tokenized yet.
    """

    def __init__(self, max_calls: int, *, timeout_s: float, max_held_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._max_held_bytes = max_held_bytes
        self.num_calls = 0
        """Calls that are answered."""
        self._num_bytes = 0
        self._arriving: dict[Caller, dict[Place, None]] = {}
        """Calls whose bodies come, the oldest first."""

    @property
    def num_arriving(self) -> int:
        return sum(map(len, self._arriving.values()))

    def arrive(self, caller: Caller, *, arrived_s: float | None = None) -> Place:
        """Lets a call send its body; its place must be left.

        Args:
            arrived_s: time of its first byte on the event loop's clock; default: now.

        Raises:
            OverloadedError: its key or the service has as many calls in hand as are allowed.
        """
        self._check_calls()
        now_s = asyncio.get_running_loop().time()
        place = Place(self, caller, now_s if arrived_s is None else arrived_s, self._timeout_s)
        if self.num_arriving >= self._max_calls:
            self._displace(lambda _: 1)
        self._arriving.setdefault(caller, {})[place] = None
        return place

    def begin(self, place: Place) -> None:
        """Gives a call whose body is there a place among those that are answered. Raises OverloadedError."""
        self.forget(place)
        self._check_calls()
        self.num_calls += 1

    def hold(self, num_bytes: int) -> None:
        """Counts bytes of a body, which may cost others the room for theirs."""
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_held_bytes and self._displace(lambda place: place.num_bytes):
            pass

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        assert self._num_bytes >= 0

    def forget(self, place: Place) -> None:
        """The call's body does not come any longer. Idempotent."""
        arriving = self._arriving.get(place.caller, {})
        arriving.pop(place, None)
        if not arriving:
            self._arriving.pop(place.caller, None)

    def _check_calls(self) -> None:
        if self.num_calls >= self._max_calls:
            reason = f"{self._max_calls} calls are in hand; allowed: {self._max_calls}"
            raise OverloadedError(reason, _RETRY_AFTER_S)

    def _displace(self, size: Callable[[Place], int]) -> bool:
        """Sends away the oldest call of the caller that has most; False: nobody has anything."""
        held = {caller: sum(map(size, places)) for caller, places in self._arriving.items()}
        caller = max(held, key=lambda one: held[one], default=None)
        if caller is None or not held[caller]:
            return False
        victim = next(place for place in self._arriving[caller] if size(place))
        self.forget(victim)
        victim.displace()
        return True


class Place:
    """One call on its way from its first byte to its answer's last; a context manager, which leaves it.

    Raises:
        OverloadedError: its key has as many calls in hand as are allowed.
    """

    def __init__(self, places: Places, caller: Caller, arrived_s: float, timeout_s: float) -> None:
        self.caller = caller
        self.quota = caller.enter()
        """What the call holds of its key's quota."""
        self.deadline_s = arrived_s + timeout_s
        """Time on the event loop's clock after which nobody wants the answer."""
        self.num_bytes = 0
        self._places = places
        self._arrived_s = arrived_s
        self._began_s = asyncio.get_running_loop().time()
        self._is_answered = False
        self.is_displaced = False
        self._waiting: asyncio.Timeout | None = None
        self._at_end: list[Callable[[], None]] = []

    @property
    def turn(self) -> Turn:
        return Turn(self.caller.standing("", 0)[0], self.deadline_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, more than 0. Raises DeadlineExceededError."""
        remaining_s = self.deadline_s - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise self._too_late()
        return remaining_s

    def limit(self, timeout_s: float) -> None:
        """The answer is wanted within ``timeout_s`` of the call's first byte; the shortest time counts."""
        self.deadline_s = min(self.deadline_s, self._arrived_s + timeout_s)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self.deadline_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._too_late() from None

    async def receive(self, part: Awaitable[PartT], *, grace_s: float = BODY_GRACE_S) -> PartT:
        """Waits for the next part of the call's body.

        Args:
            grace_s: seconds that a body may take whatever its size.

        Raises:
            TimeoutError: it comes too slowly.
            DeadlineExceededError: the time of the whole call is over.
            OverloadedError: another call has taken the room.
        """
        paced_s = self._began_s + min(BODY_TIMEOUT_S, grace_s + self.num_bytes / 1024)
        try:
            async with asyncio.timeout_at(min(paced_s, self.deadline_s)) as self._waiting:
                received = await part
        except TimeoutError:
            self._check_displaced()
            if self.deadline_s < paced_s:
                raise self._too_late() from None
            raise
        finally:
            self._waiting = None
        self._check_displaced()
        return received

    def hold(self, num_bytes: int) -> None:
        """Counts bytes of the body that have come. Raises OverloadedError: there is no room for them."""
        self.num_bytes += num_bytes
        self._places.hold(num_bytes)
        self._check_displaced()

    def to_model(self, name: str) -> None:
        """The call, whose body has come, is for this model. Raises OverloadedError: its key has too much."""
        self.caller = self.quota.to_model(name)

    def begin(self) -> None:
        self._places.begin(self)
        self._is_answered = True

    def release_body(self) -> None:
        """Nothing of the body is needed any longer. Idempotent."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        self._places.give_back(num_bytes)

    def displace(self) -> None:
        self.is_displaced = True
        self.release_body()
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def at_end(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when the call leaves its place, after the last of its answer."""
        self._at_end.append(action)

    def leave(self) -> None:
        while self._at_end:
            self._at_end.pop()()
        self._places.forget(self)
        self.release_body()
        self.quota.close()
        self._places.num_calls -= self._is_answered
        self._is_answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def _check_displaced(self) -> None:
        if self.is_displaced:
            raise OverloadedError("the body came too slowly: others have taken its room", _RETRY_AFTER_S)

    def _too_late(self) -> DeadlineExceededError:
        seconds = self.deadline_s - self._arrived_s
        return DeadlineExceededError(f"the request was not answered within {seconds:g} s of its first byte")
