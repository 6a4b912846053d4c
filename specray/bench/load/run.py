"""Sends requests to one server, a given number at a time, and records what came back when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specray.bench.load.client import ServerClient
from specray.bench.load.stats import Pass, RequestRecord
from specray.errors import SpecrayError

MAX_KEPT_ERRORS = 5
"""Largest number of errors kept per arm; the first ones tell what is wrong."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """A pass, and the reasons why requests of it failed."""

    measured: Pass
    errors: tuple[str, ...]


async def run_pass(
    client: ServerClient,
    bodies: Sequence[Mapping[str, Any]],
    *,
    concurrency: int,
    labels: Sequence[str] = (),
    is_stream: bool = True,
    on_done: Callable[[], None] = lambda: None,
) -> PassResult:
    """Sends every body once, ``concurrency`` at a time; counts and reports requests that fail.

    Args:
        labels: of the bodies, kept with their records; empty: none.
        on_done: called after each request.
    """
    waiting = iter(zip(bodies, labels or [""] * len(bodies), strict=True))
    records: list[RequestRecord] = []
    errors: list[str] = []

    async def work() -> None:
        for body, label in waiting:
            try:
                records.append(replace(await send(client, body, is_stream=is_stream), label=label))
            except SpecrayError as error:
                errors.append(str(error))
            on_done()

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    duration_s = time.monotonic() - started_s
    return PassResult(Pass(tuple(records), duration_s, len(errors)), tuple(errors))


async def send(client: ServerClient, body: Mapping[str, Any], *, is_stream: bool = True) -> RequestRecord:
    """Sends one request and times it. Raises like ``ServerClient.stream_completion``.

    Args:
        body: the request; its ``stream_options`` may ask for more than usage at the end.
    """
    started_s = time.monotonic()
    if not is_stream:
        answer = await client.complete(body)
        return _record(started_s, (), answer)
    event_times_s: list[float] = []
    num_first_tokens: int | None = None
    last: Mapping[str, Any] = {}
    options = {"include_usage": True, **body.get("stream_options", {})}
    async for event in client.stream_completion({**body, "stream_options": options}):
        if event.text:
            if not event_times_s:
                num_first_tokens = (event.body.get("usage") or {}).get("completion_tokens")
            event_times_s.append(event.arrived_s)
        if event.body.get("usage"):
            last = event.body
    if not last:
        raise SpecrayError("the stream ended without its usage")
    return _record(started_s, tuple(event_times_s), last, num_first_tokens)


def _record(
    started_s: float,
    event_times_s: tuple[float, ...],
    answer: Mapping[str, Any],
    num_first_tokens: int | None = None,
) -> RequestRecord:
    counters = _counters(answer)
    return RequestRecord(
        started_s=started_s,
        event_times_s=event_times_s,
        ended_s=time.monotonic(),
        num_prompt_tokens=answer["usage"]["prompt_tokens"],
        num_output_tokens=answer["usage"]["completion_tokens"],
        num_spec_steps=counters.get("num_spec_steps", 0),
        num_draft_tokens=counters.get("num_draft_tokens", 0),
        num_accepted_draft_tokens=counters.get("num_accepted_draft_tokens", 0),
        num_first_tokens=num_first_tokens,
    )


def _counters(answer: Mapping[str, Any]) -> Mapping[str, int]:
    timings = answer.get("timings") or {}
    if "draft_n" in timings:
        return {
            "num_draft_tokens": timings["draft_n"],
            "num_accepted_draft_tokens": timings["draft_n_accepted"],
        }
    counters: Mapping[str, int] = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return counters
