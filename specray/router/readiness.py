"""Checks that the target works: by a verdict of the last seconds, or by the next one within its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specray.errors import EngineLostError, OverloadedError
from specray.interfaces import Clock
from specray.requests import GenerateRequest, OutputChunk
from specray.router.admission.checks import probe_request
from specray.router.rounds import Rounds
from specray.router.transport.clock import within

READY_FRESH_S = 5.0
"""A verdict this young proves that the target works; no probe is needed."""
_LOOK_S = 0.01


class Readiness:
    """Sees to it that the target has something to do, and that it does it."""

    def __init__(
        self, complete: Callable[[GenerateRequest], Awaitable[OutputChunk]], clock: Clock, timeout_s: float
    ) -> None:
        self._complete = complete
        self._clock = clock
        self._timeout_s = timeout_s
        self._num_probes = 0

    async def check(self, rounds: Rounds) -> None:
        """Raises EngineLostError unless a step of the target succeeds in time, whoever's it is."""
        last_s = rounds.last_verdict_s
        if last_s is not None and self._clock.monotonic() - last_s < READY_FRESH_S:
            return
        try:
            await within(self._clock, self._timeout_s, self._next_verdict(rounds))
        except TimeoutError:
            reason = f"no step of the target within verify_timeout_s = {self._timeout_s:g} s"
            raise EngineLostError(reason) from None

    async def _next_verdict(self, rounds: Rounds) -> None:
        last_s = rounds.last_verdict_s
        self._num_probes += 1
        probe = asyncio.ensure_future(self._complete(probe_request(f"ready-{id(self):x}-{self._num_probes}")))
        try:
            while rounds.last_verdict_s == last_s:
                # A busy router refuses the probe or lets it wait: then what others have of the target counts.
                if probe.done() and (error := probe.exception()) and not isinstance(error, OverloadedError):
                    raise EngineLostError(f"a probe failed: {error}") from error
                if rounds.target is None:
                    raise EngineLostError("the target was lost")
                await self._clock.sleep(_LOOK_S)
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
