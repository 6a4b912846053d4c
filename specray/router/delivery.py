"""The way of one request's tokens back to its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from specray.interfaces import Clock
from specray.types import FinishReason, OutputChunk, SpeculationStats, TokenLogprobs


class Delivery:
    """Collects what is committed; the caller takes it whole or as chunks of a stream.

    Args:
        request_id: of the chunks.
        is_stream: False: the caller is woken once, at the end.
    """

    def __init__(self, request_id: str, *, is_stream: bool) -> None:
        self._request_id = request_id
        self._is_stream = is_stream
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: OutputChunk | None = None
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Nothing more will be pushed."""
        return self._last is not None or self._error is not None

    # The router's side

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds newly committed tokens."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        if self._is_stream:
            self._wake.set()

    def finish(
        self,
        finish_reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        message: str = "",
        stats: SpeculationStats | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Ends the output."""
        self._last = OutputChunk(
            self._request_id,
            (),
            (),
            finish_reason,
            stop_reason,
            message=message,
            stats=stats,
            num_cached_tokens=num_cached_tokens,
        )
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Ends the output by an exception for the caller."""
        self._error = error
        self._wake.set()

    # The caller's side

    async def whole(self) -> OutputChunk:
        """The output as one chunk. Raises what ``fail`` was given."""
        while not self.is_ended:
            self._wake.clear()
            await self._wake.wait()
        return self._take()

    async def chunks(self, clock: Clock, interval_s: float) -> AsyncGenerator[OutputChunk, None]:
        """First tokens at once, then at most one chunk per interval; the end is never held back."""
        while True:
            while not self._token_ids and not self.is_ended:
                self._wake.clear()
                await self._wake.wait()
            chunk = self._take()
            yield chunk
            if chunk.finish_reason is not None:
                return
            if interval_s > 0 and not self.is_ended:
                await self._pause(clock, interval_s)

    async def _pause(self, clock: Clock, seconds: float) -> None:
        timer = asyncio.ensure_future(clock.sleep(seconds))
        timer.add_done_callback(lambda _: self._wake.set())
        try:
            while not timer.done() and not self.is_ended:
                self._wake.clear()
                await self._wake.wait()
        finally:
            timer.cancel()

    def _take(self) -> OutputChunk:
        token_ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        if self._error is not None:
            raise self._error
        last = self._last
        if last is None:
            return OutputChunk(self._request_id, token_ids, logprobs)
        return replace(last, token_ids=token_ids, logprobs=logprobs)
