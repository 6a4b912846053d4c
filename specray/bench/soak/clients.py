"""The clients of a soak: they send requests one after another, cancel some, and record when text came."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specray.bench.load.client import ServerClient
from specray.bench.soak.cases import Case, ClientOutput, Way
from specray.bench.soak.ledger import Attempt, End
from specray.errors import EngineLostError, SpecrayError
from specray.rpc.inference.client import SpecrayClient


@dataclass(slots=True)
class OutputSoFar:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    num_tokens: int | None = None

    def output(self) -> ClientOutput:
        ids = None if self.token_ids is None else tuple(self.token_ids)
        return ClientOutput("".join(self.text), ids, self.num_tokens)


class CaseSender:
    """Sends cases in any way.

    Args:
        now_s: the soak's clock in seconds.
        timeout_s: seconds allowed for one attempt.
    """

    def __init__(
        self,
        http: ServerClient,
        grpc: SpecrayClient,
        *,
        model: str,
        timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._grpc = grpc
        self._model = model
        self._timeout_s = timeout_s
        self._now_s = now_s

    async def reference(self, case: Case) -> ClientOutput:
        """Returns the case's answer without speculation. Raises SpecrayError."""
        received = OutputSoFar()
        await self._over_grpc(case, received, [], has_speculation=False)
        return received.output()

    async def request(
        self,
        case: Case,
        way: Way,
        times: list[float],
        *,
        cancel_after_s: float | None = None,
        is_away: Callable[[], bool] = lambda: False,
    ) -> list[Attempt]:
        """Sends one request, and a second time if the service says so.

        Args:
            times: list for the times of the start and of each event with text.
            cancel_after_s: seconds after which the client leaves; None: it waits for the end.
            is_away: True while nobody listens, so that it is sent again and again.
        """
        times.append(self._now_s())
        attempts = [await self._attempt(case, way, times, cancel_after_s)]
        while attempts[-1].end is End.RETRIABLE and (len(attempts) == 1 or is_away()):
            # Seconds before a retry, as a service that is away asks for (Retry-After).
            await asyncio.sleep(1.0)
            attempts.append(await self._attempt(case, way, times, cancel_after_s))
        return attempts

    async def _attempt(
        self, case: Case, way: Way, times: list[float], cancel_after_s: float | None
    ) -> Attempt:
        started_s = self._now_s()
        received = OutputSoFar()
        end, reason = End.DONE, ""
        timer = asyncio.timeout(self._timeout_s if cancel_after_s is None else cancel_after_s)
        try:
            async with timer:
                await self._send(case, way, received, times)
        except TimeoutError:
            is_planned = cancel_after_s is not None
            end = End.CANCELLED if is_planned else End.ERROR
            reason = "" if is_planned else f"no end within {self._timeout_s:g} s"
        except EngineLostError as error:
            end, reason = End.RETRIABLE, str(error)
        except SpecrayError as error:
            end, reason = End.ERROR, f"{type(error).__name__}: {error}"
        if end is End.DONE and received.num_tokens is None:
            end, reason = End.ERROR, "the stream ended without its usage"
        return Attempt(end, received.output(), started_s, self._now_s(), reason)

    async def _send(self, case: Case, way: Way, received: OutputSoFar, times: list[float]) -> None:
        if way is Way.GRPC:
            await self._over_grpc(case, received, times)
        elif way is Way.STREAM:
            await self._streamed(case, received, times)
        else:
            answer = await self._http.complete(case.body(self._model))
            received.text.append(answer["choices"][0]["text"])
            received.num_tokens = answer["usage"]["completion_tokens"]

    async def _streamed(self, case: Case, received: OutputSoFar, times: list[float]) -> None:
        body = {**case.body(self._model), "stream_options": {"include_usage": True}}
        async with contextlib.aclosing(self._http.stream_completion(body)) as events:
            async for event in events:
                if event.text:
                    received.text.append(event.text)
                    times.append(self._now_s())
                if event.body.get("usage"):
                    received.num_tokens = event.body["usage"]["completion_tokens"]

    async def _over_grpc(
        self, case: Case, received: OutputSoFar, times: list[float], *, has_speculation: bool = True
    ) -> None:
        received.token_ids = []
        params = case.params(has_speculation=has_speculation)
        events = self._grpc.generate(params, timeout_s=self._timeout_s)
        async with contextlib.aclosing(events):
            async for event in events:
                received.text.append(event.text)
                received.token_ids += event.token_ids
                if event.token_ids:
                    times.append(self._now_s())
                if event.usage is not None:
                    received.num_tokens = event.usage.num_output_tokens


@dataclass(frozen=True, slots=True)
class NextRequest:
    case: Case
    way: Way
    cancel_after_s: float | None


def draw(cases: Sequence[Case], rng: random.Random, *, cancel_share: float, is_steady: bool) -> NextRequest:
    """Draws a client's next request. ``is_steady``: a long stream that is not cancelled."""
    if is_steady:
        long = [case for case in cases if case.is_long]
        return NextRequest(rng.choice(long or list(cases)), rng.choice((Way.STREAM, Way.GRPC)), None)
    is_cancelled = rng.random() < cancel_share
    return NextRequest(
        rng.choice(list(cases)),
        rng.choice(list(Way)),
        rng.uniform(0.05, 1.0) if is_cancelled else None,
    )
