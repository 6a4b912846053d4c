"""Fake router client without an engine, for tests of an ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from specray.errors import EngineLostError
from specray.interfaces import Clock, StopMatcherFactory
from specray.requests import FinishReason, GenerateRequest, OutputChunk, ServiceInfo, SpeculationStats
from specray.types import TokenLogprobs


def echo(request: GenerateRequest) -> tuple[int, ...]:
    """Repeats the prompt up to max_tokens."""
    prompt = request.prompt_token_ids
    return tuple(prompt[index % len(prompt)] for index in range(request.max_tokens))


class FakeRouterClient:
    """interfaces.RouterClient with scripted output.

    Stop token ids, stop strings (with a matcher factory) and max_tokens end the output as in the real router.
    ``requests`` records requests, ``aborted_request_ids`` those cancelled or closed early.

    Args:
        reply: output tokens of a request, before stop conditions.
        errors: raised by the next calls, one each, in this order.
        chunk_size: tokens per chunk of a stream.
        chunk_interval_s: seconds before each chunk, and before the answer of ``complete``; needs a clock.
        clock: clock of these pauses.
        stop_matcher_factory: matches stop strings; None ignores them.
        info: answer of ``service_info``; may be changed.
        is_ready: False makes ``check_ready`` raise EngineLostError.
        cached: prompt tokens reported as found in the prefix cache.
    """

    def __init__(
        self,
        *,
        reply: Callable[[GenerateRequest], Sequence[int]] = echo,
        errors: Sequence[Exception] = (),
        chunk_size: int = 1,
        chunk_interval_s: float = 0.0,
        clock: Clock | None = None,
        stop_matcher_factory: StopMatcherFactory | None = None,
        info: ServiceInfo | None = None,
        is_ready: bool = True,
        cached: Callable[[GenerateRequest], int] = lambda request: 0,
    ) -> None:
        self._reply = reply
        self._errors = list(errors)
        self._chunk_size = chunk_size
        self._chunk_interval_s = chunk_interval_s
        self._clock = clock
        self._stop_matcher_factory = stop_matcher_factory
        self.info = info or ServiceInfo("fake", "fake-draft", 64, 4096, 1, "0")
        self._cached = cached
        self.is_ready = is_ready
        self.trace: str | None = None
        """Answer of ``trace_text``."""
        self.requests: list[GenerateRequest] = []
        self.aborted_request_ids: list[str] = []

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        self._take(request)
        is_done = False
        try:
            await self._pause()
            is_done = True
        finally:
            if not is_done:
                self.aborted_request_ids.append(request.request_id)
        return self._chunks(request, size=request.max_tokens)[-1]

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        self._take(request)
        is_done = False
        try:
            for chunk in self._chunks(request, size=self._chunk_size):
                await self._pause()
                is_done = chunk.finish_reason is not None
                yield chunk
        finally:
            if not is_done:
                self.aborted_request_ids.append(request.request_id)

    async def service_info(self) -> ServiceInfo:
        return self.info

    async def check_ready(self) -> None:
        if not self.is_ready:
            raise EngineLostError("the fake target is lost")

    async def metrics_text(self) -> str:
        return "# HELP specray_fake A metric.\n# TYPE specray_fake counter\nspecray_fake_total 1.0\n"

    async def trace_text(self) -> str | None:
        return self.trace

    def _take(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        if self._errors:
            raise self._errors.pop(0)

    async def _pause(self) -> None:
        if self._clock is not None and self._chunk_interval_s > 0:
            await self._clock.sleep(self._chunk_interval_s)

    def _chunks(self, request: GenerateRequest, *, size: int) -> list[OutputChunk]:
        tokens, finish_reason, stop_reason = self._stopped(request)
        chunks = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            is_last = start + size >= len(tokens)
            logprobs: tuple[TokenLogprobs, ...] = ()
            if request.sampling.num_logprobs is not None:
                logprobs = tuple(TokenLogprobs(token, -0.5, (token,), (-0.5,)) for token in part)
            chunks.append(
                OutputChunk(
                    request.request_id,
                    part,
                    logprobs,
                    finish_reason=finish_reason if is_last else None,
                    stop_reason=stop_reason if is_last else None,
                    stats=SpeculationStats(2, 8, 4, (0, 1, 0, 1)) if is_last else None,
                    num_cached_tokens=self._cached(request) if is_last else 0,
                    prompt_logprobs=_prompt_logprobs(request) if is_last else (),
                )
            )
        return chunks

    def _stopped(self, request: GenerateRequest) -> tuple[tuple[int, ...], FinishReason, str | int | None]:
        tokens: list[int] = []
        factory = self._stop_matcher_factory
        matcher = factory(request.stop, request.prompt_token_ids) if factory else None
        for token in tuple(self._reply(request))[: request.max_tokens]:
            tokens.append(token)
            if token in request.sampling.stop_token_ids:
                is_eos = token in request.eos_token_ids
                return tuple(tokens), FinishReason.STOP, None if is_eos else token
            if matcher is not None and (stop := matcher.push([token])) is not None:
                return tuple(tokens), FinishReason.STOP, stop
        return tuple(tokens), FinishReason.LENGTH, None


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    """Minus a hundredth of each token's id, next to token 0, which is likelier."""
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None:
        return ()
    top = ((0,), (-0.005,)) if num_top else ((), ())
    return tuple(TokenLogprobs(token, -token / 100, *top) for token in request.prompt_token_ids[1:])
