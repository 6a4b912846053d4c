"""One request's attempts on Routers that may die under it, or refuse it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specray.errors import EngineLostError, OverloadedError
from specray.interfaces import Clock
from specray.requests import GenerateRequest, OutputChunk, Resumption

RESEND_FOR_S: Final = 5.0
"""Seconds after a router's death during which Serve may still choose it."""
MAX_RESUMED: Final = 5
"""Maximum number of routers that may die under one request with tokens; it might be what kills them."""


class RouterLostError(EngineLostError):
    """The router that had the call has died, or its output was lost."""


class Attempts:
    """One request's attempts: when its router dies, the next router continues the output.

    So neither a dead router nor one whose grace period is over loses output. Tokens of greedy and coupled
    sampling do not change. With rejection sampling the draws depend on where rounds end, as always; the
    distribution is the same, since tokens that the caller has are kept.
    """

    def __init__(self, request: GenerateRequest, clock: Clock, *, timeout_s: float, has_others: bool) -> None:
        self.request = request
        """The request as the next router gets it."""
        self._asked = request
        self._clock = clock
        self._checkpoint = ""
        self._began_s = clock.monotonic()
        self._end_s = self._began_s + (timeout_s if request.timeout_s is None else request.timeout_s)
        self._token_ids: list[int] = []
        self._may_try_another = has_others
        self._ttft_s: float | None = None
        self._num_resumed = 0
        self._lost_s: float | None = None
        """Time of the first router's loss since tokens last arrived, in seconds."""

    def take(self, chunk: OutputChunk) -> OutputChunk:
        """Converts a chunk for the caller: later routers do not count the first tokens."""
        self._checkpoint = chunk.checkpoint or self._checkpoint
        if chunk.token_ids:
            self._token_ids.extend(chunk.token_ids)
            self._lost_s = None
            if self._ttft_s is None:
                self._ttft_s = self._clock.monotonic() - self._began_s
        if self.request.resumed is not None and chunk.finish_reason is not None:
            return replace(chunk, ttft_s=self._ttft_s)
        return chunk

    @property
    def own_token_ids(self) -> Sequence[int]:
        """Tokens of the output since the request was made or resumed."""
        resumed = self.request.resumed
        return self._token_ids[0 if resumed is None else len(resumed.token_ids) :]

    def try_another(self, error: OverloadedError) -> None:
        """Makes the request for another router than the one that refused it, once; else raises ``error``."""
        if not self._may_try_another:
            raise error
        self._may_try_another = False
        self.request = replace(self.request, request_id=self._new_id())

    async def renew(self, error: RouterLostError) -> None:
        """Makes the request for the next router, under a new id, since the last may be cut off, not dead.

        Raises ``error`` after too many attempts.
        """
        now_s = self._clock.monotonic()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self._num_resumed += bool(self._token_ids)
        if now_s - self._lost_s > RESEND_FOR_S or self._num_resumed > MAX_RESUMED:
            raise error
        await self._clock.sleep(0.25)
        remaining_s = self._end_s - self._clock.monotonic()
        if remaining_s <= 0:
            raise error
        asked, token_ids = self._asked, tuple(self._token_ids)
        self.request = replace(
            asked,
            request_id=self._new_id(),
            timeout_s=None if asked.timeout_s is None else remaining_s,
            resumed=Resumption(token_ids, self._checkpoint) if token_ids else None,
        )

    def _new_id(self) -> str:
        return f"{self._asked.request_id[:40]}-{uuid.uuid4().hex[:8]}"
