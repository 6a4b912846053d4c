"""Carries the new tokens of one request from the session to its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from specray.interfaces import Clock
from specray.requests import FinishReason, OutputChunk, RouterLoad, SpeculationStats
from specray.round_reports import RoundReport
from specray.types import TokenLogprobs


class Delivery:
    """Collects committed tokens; the caller takes them all at the end, or as chunks of a stream.

    Args:
        is_stream: True if the caller takes chunks; False: it is woken once, at the end.
        on_change: called, before the caller is woken, when there is something to take.
    """

    def __init__(
        self, request_id: str, *, is_stream: bool, on_change: Callable[[Delivery], None] | None = None
    ) -> None:
        self._request_id = request_id
        # With ``on_change`` somebody else takes the chunks; the caller waits for the end alone.
        self._wakes_always = is_stream and on_change is None
        self._on_change = on_change
        self.checkpoint = ""
        """Digest of the target that writes the output, for the first chunk."""
        self.say_load: Callable[[], RouterLoad] | None = None
        """Says how busy the router is, for the first and the last chunk."""
        self._load: RouterLoad | None = None
        """Load of a router elsewhere, as its last chunk said."""
        self._is_begun = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._rounds: list[RoundReport] = []
        self._last: OutputChunk | None = None
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """True if nothing more will be pushed."""
        return self._last is not None or self._error is not None

    @property
    def is_failed(self) -> bool:
        return self._error is not None

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    # The router's side

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        rounds: Sequence[RoundReport] = (),
    ) -> None:
        """Adds newly committed tokens, and the rounds that brought them where the caller watches them."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._rounds.extend(rounds)
        if self._on_change is not None:
            self._on_change(self)
        if self._wakes_always:
            self._wake.set()

    def put(self, chunk: OutputChunk) -> None:
        """Adds a chunk of the same output that another process has sent."""
        self.checkpoint = self.checkpoint or chunk.checkpoint
        self._load = chunk.load or self._load
        if chunk.finish_reason is not None:
            self._last = replace(chunk, token_ids=(), logprobs=(), rounds=(), checkpoint="")
        self.push(chunk.token_ids, chunk.logprobs, chunk.rounds)
        if chunk.finish_reason is not None:
            self._wake.set()

    def finish(
        self,
        finish_reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        stats: SpeculationStats | None = None,
        num_cached_tokens: int = 0,
        ttft_s: float | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Ends the output."""
        self._last = OutputChunk(
            self._request_id,
            (),
            (),
            finish_reason,
            stop_reason,
            stats=stats,
            num_cached_tokens=num_cached_tokens,
            ttft_s=ttft_s,
            prompt_logprobs=tuple(prompt_logprobs),
        )
        if self._on_change is not None:
            self._on_change(self)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Ends the output by an exception for the caller."""
        self._error = error
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    # The caller's side

    async def wait_change(self) -> None:
        """Returns at the end, or when somebody calls ``wake``."""
        await self._wake.wait()
        self._wake.clear()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def whole(self) -> OutputChunk:
        """Waits for the end and returns the output as one chunk. Raises the error that ``fail`` was given."""
        while not self.is_ended:
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    async def chunks(self, clock: Clock, interval_s: float) -> AsyncGenerator[OutputChunk, None]:
        """Yields first tokens at once, then at most one chunk per interval; the end is never held back."""
        while True:
            while not self._token_ids and not self.is_ended:
                self._wake.clear()
                await self._wake.wait()
            chunk = self.take()
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

    def take(self) -> OutputChunk:
        """Returns all that has come since the last call. Raises the error that ``fail`` was given."""
        checkpoint = "" if self._is_begun else self.checkpoint
        load, self._load = self._load, None
        if self.say_load is not None and (self._last is not None or not self._is_begun):
            load = self.say_load()
        self._is_begun = True
        token_ids, logprobs, rounds = tuple(self._token_ids), tuple(self._logprobs), tuple(self._rounds)
        self._token_ids.clear()
        self._logprobs.clear()
        self._rounds.clear()
        if self._error is not None:
            raise self._error
        last = self._last
        if last is None:
            last = OutputChunk(self._request_id, ())
        return replace(
            last, token_ids=token_ids, logprobs=logprobs, rounds=rounds, checkpoint=checkpoint, load=load
        )
