"""Turns the router's chunks into what users see: text, logprobs and finish reasons of one or many choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from specray.errors import EngineLostError
from specray.interfaces import RouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk, SpeculationStats
from specray.round_reports import RoundReport
from specray.tokenization import TextStream, Tokenizer
from specray.types import TokenLogprobs

Entrance = Callable[[GenerateRequest], AbstractContextManager[None]]


def _freely(_: GenerateRequest) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one choice since its last delta; without streaming, all of it."""

    index: int
    """Index of the choice, counted over all prompts of the call."""
    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()
    """Parts of the text by the token that brought them; one more where the end brought the last of it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    """Offset in characters, in the output's text, at which the token of each logprob begins."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; comes with the finish reason."""
    ttft_s: float | None = None
    """Seconds that the router took to the first tokens; comes with the finish reason."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the prompt's tokens but the first; they come with the finish reason."""
    rounds: tuple[RoundReport, ...] = ()
    """Rounds that brought the tokens, where the call asks for them."""

    @property
    def is_visible(self) -> bool:
        """False for tokens that do not complete a text yet."""
        return bool(self.text or self.logprobs or self.finish_reason)


class Choice:
    """One output that is being detokenised."""

    def __init__(self, index: int, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._index = index
        self._hides_stop_token = not request.text.include_stop
        self._text = TextStream(
            tokenizer,
            request.stop,
            prompt_token_ids=request.prompt_token_ids,
            min_tokens=request.sampling.min_tokens,
            options=request.text,
        )

    def advance(self, chunk: OutputChunk) -> Delta:
        """Turns a chunk into a delta.

        Raises:
            EngineLostError: the router aborted the request.
        """
        if chunk.finish_reason is FinishReason.ABORT:
            raise EngineLostError("the request was aborted; it may be sent again")
        pieces, offsets = list[str](), list[int]()
        for position, token_id in enumerate(chunk.token_ids):
            offsets.append(self._text.num_chars)
            if not (self._hides_stop_token and _is_stop_token(chunk, position)):
                pieces.append(self._text.push([token_id]))
        if chunk.finish_reason is not None:
            pieces.append(self._text.finish())
        return Delta(
            index=self._index,
            text="".join(pieces),
            token_ids=chunk.token_ids,
            pieces=tuple(pieces),
            logprobs=chunk.logprobs,
            text_offsets=tuple(offsets[: len(chunk.logprobs)]),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            stats=chunk.stats,
            num_cached_tokens=chunk.num_cached_tokens,
            ttft_s=chunk.ttft_s,
            prompt_logprobs=chunk.prompt_logprobs,
            rounds=chunk.rounds,
        )


async def complete(
    routers: RouterClient,
    requests: Sequence[GenerateRequest],
    tokenizer: Tokenizer,
    *,
    timeout_s: float,
    entered: Entrance = _freely,
) -> list[Delta]:
    """Returns all outputs, in the order of the requests.

    The first failure, or a cancellation, aborts the others.

    Args:
        entered: makes what is open while a request is with a router.

    Raises:
        EngineLostError: the target was lost, or the answer took longer than ``timeout_s``.
        OverloadedError, InvalidRequestError: the router refused a request.
    """

    async def whole(request: GenerateRequest) -> OutputChunk:
        with entered(request):
            return await routers.complete(request)

    tasks = [asyncio.create_task(whole(request)) for request in requests]
    try:
        async with asyncio.timeout(timeout_s):
            chunks = await asyncio.gather(*tasks)
    except TimeoutError:
        raise _too_late(timeout_s) from None
    finally:
        await _cancel(tasks)
    return [
        Choice(index, request, tokenizer).advance(chunk)
        for index, (request, chunk) in enumerate(zip(requests, chunks, strict=True))
    ]


def stream(
    routers: RouterClient,
    requests: Sequence[GenerateRequest],
    tokenizer: Tokenizer,
    *,
    timeout_s: float,
    entered: Entrance = _freely,
) -> AsyncIterator[Delta]:
    """Yields the outputs as they grow, interleaved; closing the iterator aborts what is not finished.

    As ``complete``; called on the event loop, since the time begins here.
    """
    end_s = asyncio.get_running_loop().time() + timeout_s

    async def choice_stream(index: int, request: GenerateRequest) -> AsyncIterator[Delta]:
        choice = Choice(index, request, tokenizer)
        is_finished = False
        with entered(request):
            chunks = routers.stream(request)
            try:
                # To its own end, though the last chunk is known: closing it earlier would be an abort.
                while True:
                    # A timeout that spans a yield would cancel whichever task happens to run then.
                    async with asyncio.timeout_at(end_s):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        break
                    is_finished = chunk.finish_reason is not None
                    yield choice.advance(chunk)
            except TimeoutError:
                raise _too_late(timeout_s) from None
            finally:
                await close(chunks)
        if not is_finished:
            raise EngineLostError("the stream ended without a finish reason; the request may be sent again")

    choices = [choice_stream(index, request) for index, request in enumerate(requests)]
    # A single stream needs no queue and no task: with many calls they would take cores from the engines.
    return choices[0] if len(choices) == 1 else _merge(choices)


async def close(iterator: AsyncIterator[object]) -> None:
    """Closes an async generator at once, not when it is garbage-collected; leaves other iterators alone."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def _merge(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Yields what any of the streams yields, as it comes; the first exception ends all of them."""
    # One entry per stream is enough: a slow reader holds up the streams, and this process needs no memory.
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(source, queue)) for source in streams]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _pump(source: AsyncIterator[Delta], queue: asyncio.Queue[Delta | Exception | None]) -> None:
    end: Exception | None = None
    try:
        async for delta in source:
            await queue.put(delta)
    except Exception as error:
        end = error
    finally:
        await close(source)
    await queue.put(end)


async def _cancel(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[OutputChunk]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_stop_token(chunk: OutputChunk, position: int) -> bool:
    """True for a stop token, which ends the output without text. TextStream cuts stop strings."""
    return (
        chunk.finish_reason is FinishReason.STOP
        and not isinstance(chunk.stop_reason, str)
        and position == len(chunk.token_ids) - 1
    )


def _too_late(timeout_s: float) -> EngineLostError:
    return EngineLostError(f"no answer within {timeout_s:.3g} s; the request may be sent again")
