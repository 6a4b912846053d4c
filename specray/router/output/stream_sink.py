"""Collects the chunks of many requests and sends one message per step to each Ingress."""

from __future__ import annotations

import asyncio
import contextlib

from specray.errors import SpecrayError
from specray.interfaces import Clock
from specray.requests import OutputChunk
from specray.router.output.delivery import Delivery
from specray.router.transport.clock import within


class StreamSink:
    """Collects chunks for one receiver; whoever sends them takes batch after batch.

    At most one batch leaves per interval, but the first and the last chunk of a request are never held back,
    and take along what there is of others.

    Args:
        interval_s: in seconds; 0: a batch leaves as soon as there is one.
    """

    def __init__(self, clock: Clock, interval_s: float) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._open: set[Delivery] = set()
        self._changed: dict[Delivery, None] = {}
        """Deliveries with something to send, in the order of their first change."""
        self._has_change = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._sent_s: float | None = None
        self._error: SpecrayError | None = None

    def set_interval(self, interval_s: float) -> None:
        """Batches leave ``interval_s`` seconds apart from now on."""
        self._interval_s = interval_s

    def open(self, request_id: str) -> Delivery:
        return Delivery(request_id, is_stream=True, on_change=self._note)

    async def wait_ended(self, delivery: Delivery) -> None:
        """Returns when the output is complete; its last chunk may still be on its way.

        Raises:
            SpecrayError: what ended it, or why the receiver cannot be reached.
        """
        self._open.add(delivery)
        try:
            while self._error is None and not delivery.is_ended:
                await delivery.wait_change()
        finally:
            self._open.discard(delivery)
        if not delivery.is_ended and self._error is not None:
            raise self._error
        delivery.raise_error()

    def fail(self, error: SpecrayError) -> None:
        """The receiver is gone: everybody who waits gets ``error``. The first one counts."""
        if self._error is None:
            self._error = error
        self._has_change.set()
        self._is_urgent.set()
        for delivery in self._open:
            delivery.wake()

    async def batch(self) -> list[OutputChunk]:
        """Waits for what is to be sent next. Raises the error that ``fail`` was given."""
        while True:
            await self._has_change.wait()
            await self._pause()
            if self._error is not None:
                raise self._error
            changed = list(self._changed)
            self._changed.clear()
            self._has_change.clear()
            self._is_urgent.clear()
            self._sent_s = self._clock.monotonic()
            chunks = [delivery.take() for delivery in changed if not delivery.is_failed]
            if chunks:
                return chunks

    def _note(self, delivery: Delivery) -> None:
        self._changed[delivery] = None
        self._has_change.set()
        if delivery.is_ended or not delivery.is_begun:
            self._is_urgent.set()

    async def _pause(self) -> None:
        if self._sent_s is None or self._is_urgent.is_set():
            return
        remaining_s = self._sent_s + self._interval_s - self._clock.monotonic()
        if remaining_s > 0:
            with contextlib.suppress(TimeoutError):
                await within(self._clock, remaining_s, self._is_urgent.wait())
