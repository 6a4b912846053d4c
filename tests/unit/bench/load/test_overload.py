"""Tests of the overload benchmark: arrivals, the cheap client, counts, and the memory that it reads."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from rich.console import Console

from specray.bench.load import overload
from specray.bench.load.memory import read_memory, service_pids
from specray.bench.load.overload import arrivals, measure_overload
from specray.bench.load.overload_report import overload_json, overload_tables
from specray.bench.load.raw_http import RawAnswer, RawClient
from specray.bench.plans import OverloadPlan
from specray.errors import ConfigError, EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, OutputChunk, ServiceLevel
from tests.unit.serving.http.service import INFO, MODEL, REPLY, endless, say, serving

BODY = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 8, "stream": True}).encode()


def test_arrivals_are_poisson_repeatable_and_bounded_in_time_and_count() -> None:
    times = list(arrivals(100.0, 10.0, 10_000, seed=7))
    assert times == list(arrivals(100.0, 10.0, 10_000, seed=7))
    assert times == sorted(times) and times[0] > 0 and times[-1] <= 10.0
    assert 900 < len(times) < 1100
    gaps = [after - before for before, after in pairwise(times)]
    # Of exponential gaps 1/e are longer than the mean.
    assert 0.32 < sum(gap > 0.01 for gap in gaps) / len(gaps) < 0.42
    assert len(list(arrivals(100.0, 10.0, 50, seed=7))) == 50


# The client


@asynccontextmanager
async def client_of(url: str, path: str = "/v1/completions") -> AsyncIterator[RawClient]:
    client = RawClient(url, path, headers={"X-Test": "1"}, timeout_s=10.0)
    try:
        yield client
    finally:
        client.close()


async def test_stream_is_answered_with_one_time_per_event_over_a_connection_used_again() -> None:
    async with serving(say(REPLY)) as service, client_of(service.url) as client:
        for _ in range(3):
            answer = await client.post(BODY)
            assert (answer.status, answer.error) == (200, "")
            assert len(answer.event_times_s) == 8
            assert answer.started_s <= answer.event_times_s[0] <= answer.ended_s
        assert len(client.idle) == 1


async def test_refusal_tells_its_status_and_whether_it_says_when_to_come_back() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full", 3.0)])
    async with serving(router) as service, client_of(service.url) as client:
        answer = await client.post(BODY)
        assert (answer.status, answer.has_retry_after, answer.event_times_s) == (429, True, ())
        assert "full" in answer.error
        wrong = await client.post(b'{"n": 0}')
        assert (wrong.status, wrong.has_retry_after) == (400, False)


class FailingRouter(FakeRouterClient):
    """A router whose streams fail after their first chunk."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        yield OutputChunk(request.request_id, (1,))
        raise EngineLostError("the target was lost")


async def test_stream_that_fails_on_its_way_is_no_answer() -> None:
    async with serving(FailingRouter(info=INFO)) as service, client_of(service.url) as client:
        answer = await client.post(BODY)
        assert answer.status == 200
        assert "the target was lost" in answer.error


async def test_server_that_is_away_or_silent_is_an_error_not_an_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with client_of(f"http://127.0.0.1:{port}") as client:
        answer = await client.post(BODY)
        assert answer.status == 0 and answer.error
    async with serving(endless()) as service:
        client = RawClient(service.url, "/v1/completions", headers={}, timeout_s=0.2)
        assert (await client.post(BODY)).error == "no answer within 0.2 s"
        assert not client.idle, "a connection in the middle of an answer is not used again"


async def test_connection_that_was_closed_while_idle_is_replaced() -> None:
    async with serving(say(REPLY)) as service, client_of(service.url) as client:
        await client.post(BODY)
        transport = client.idle[0]._transport
        assert transport is not None
        transport.close()
        assert (await client.post(BODY)).status == 200


async def test_pieces_of_an_answer_may_be_cut_anywhere() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b'9\r\ndata: {"a"\r\n5\r\n: 1}\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    answer: RawAnswer | None = None

    async def answer_in_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (head[:20], head[20:], body[:30], body[30:-8], body[-8:-2], body[-2:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    server = await asyncio.start_server(answer_in_bytes, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with client_of(f"http://127.0.0.1:{port}") as client:
            answer = await client.post(BODY)
    assert (answer.status, answer.error, len(answer.event_times_s)) == (200, "", 1)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:8000", "ftp://x"])
def test_only_http_is_spoken(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        RawClient(url, "/", headers={}, timeout_s=1.0)


# A run


class TwoAtATime(FakeRouterClient):
    """A router that refuses a third request; each takes some tens of milliseconds."""

    num_running = 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        if self.num_running >= 2:
            raise OverloadedError("full", 1.0)
        self.num_running += 1
        try:
            async for chunk in super().stream(request):
                await asyncio.sleep(0.01)
                yield chunk
        finally:
            self.num_running -= 1


@pytest.fixture
def settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "SETTLE_S", 0.0)


async def test_a_level_that_is_not_sent_still_makes_two_classes(settles_at_once: None) -> None:
    router = TwoAtATime(info=INFO)
    async with serving(router) as service:
        plan = OverloadPlan(
            url=service.url,
            concurrency=2,
            warmup=0.0,
            capacity_duration=0.2,
            rate=25.0,
            factor=1.0,
            duration=0.2,
            max_tokens=4,
            slo_itl_ms=10_000.0,
            slo_share=0.5,
            send_slo=False,
        )
        result = await measure_overload(plan, ["a"], lambda name, share: None)
    assert {request.level for request in router.requests} == {None}
    assert [own.attainment for own in result.capacity.classes.values()] == [1.0, 1.0]


async def test_run_counts_every_request_once_and_is_shown(settles_at_once: None) -> None:
    router = TwoAtATime(info=INFO)
    async with serving(router) as service:
        plan = OverloadPlan(
            url=service.url,
            concurrency=2,
            warmup=0.2,
            capacity_duration=0.3,
            rate=25.0,
            factor=4.0,
            duration=0.5,
            max_tokens=4,
            tenant=["x", "y"],
            slo_itl_ms=5.0,
            slo_ttft_ms=10_000.0,
            slo_share=0.25,
        )
        phases: list[str] = []
        result = await measure_overload(plan, ["a"], lambda name, share: phases.append(name))
    capacity, overloaded = result.capacity, result.overload
    assert list(dict.fromkeys(phases)) == ["warm-up", "capacity", "overload"]
    # The warm-up does not count.
    assert capacity.num_sent == phases.count("capacity") < phases.count("capacity") + phases.count("warm-up")
    assert (capacity.num_refused, capacity.errors) == (0, {})
    assert result.offered_per_s == 100.0
    assert overloaded.num_sent == len(list(arrivals(100.0, 0.5, 10_000, seed=0)))
    assert overloaded.num_sent == overloaded.num_admitted + overloaded.num_refused
    assert overloaded.num_admitted >= 2 and overloaded.num_refused > overloaded.num_admitted
    assert overloaded.num_refused_with_retry_after == overloaded.num_refused
    assert overloaded.itl_ms is not None and overloaded.itl_ms.count == 3 * overloaded.num_admitted
    assert result.itl_ratio is not None and result.itl_ratio > 0
    # A quarter has the level, one request in four; an event comes every 10 ms, so nobody keeps it.
    assert [request.level is not None for request in router.requests[:8]] == [False, False, False, True] * 2
    assert router.requests[3].level == ServiceLevel(10_000.0, 5.0)
    classes = overloaded.classes
    assert sum(own.num_admitted for own in classes.values()) == overloaded.num_admitted
    assert [own.attainment for own in capacity.classes.values()] == [0.0, 0.0]
    values = overload_json(result)
    assert (values["plan"]["factor"], values["overload"]["num_refused"]) == (4.0, overloaded.num_refused)
    json.dumps(values)
    console = Console(width=120, record=True, file=io.StringIO())
    tables = overload_tables(result)
    assert tables[1].row_count == 4
    console.print(*tables)
    assert f"refused (429) │ 0 │ {overloaded.num_refused} │" in " ".join(console.export_text().split())
    if sys.platform == "linux":
        # The scripted service runs in this process.
        assert os.getpid() in [each.pid for each in result.memory_before]
        assert os.getpid() in [each.pid for each in result.memory_early]
        assert tables[2].row_count >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_whoever_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pids = service_pids(listener.getsockname()[1])
        assert pids[0] == os.getpid()
        port = listener.getsockname()[1]
    (own, *_) = read_memory(pids[:1])
    assert own.pid == os.getpid() and own.rss_bytes > 10 * 1024 * 1024
    assert service_pids(port) == ()
    assert read_memory([2**22 + 1]) == []
