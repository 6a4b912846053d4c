"""What is refused before it costs anything: calls beyond what the routers or the ingress can hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specray.config import parse_config
from specray.errors import EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, SpeculationParams
from specray.serving.adapters import AdapterCatalog
from specray.serving.admission.capacity import PROBE_S, Admission, RouterCapacity
from specray.serving.admission.places import Places
from specray.serving.generation import close, complete, stream
from specray.serving.http.app import build_http_app
from specray.types import SamplingParams
from tests.unit.serving.http.service import INFO, MODEL, TEXT, TOKENIZER, endless, serving, wait_until

NO_ADAPTERS = AdapterCatalog(None, base="tiny", loader=None)

FULL = OverloadedError("256 requests wait; allowed: 256", retry_after_s=7.0)


def request(tenant: str = "", priority: int = 0) -> GenerateRequest:
    speculation = SpeculationParams(tenant=tenant)
    return GenerateRequest("r", (1,), SamplingParams(), 4, speculation=speculation, priority=priority)


class Times:
    """A clock in seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_let_through(capacity: RouterCapacity, tenant: str = "", priority: int = 0) -> bool:
    """Begins a request if the capacity allows it; returns whether it did."""
    try:
        capacity.check(tenant, priority)
    except OverloadedError:
        return False
    capacity.begin(tenant, priority)
    return True


def test_no_more_go_to_the_routers_than_they_hold() -> None:
    capacity = RouterCapacity(3, monotonic=Times())
    assert [is_let_through(capacity) for _ in range(4)] == [True, True, True, False]
    capacity.end("", 0, None)
    assert [is_let_through(capacity) for _ in range(2)] == [True, False]


def test_full_routers_are_asked_for_whoever_might_displace_another() -> None:
    capacity = RouterCapacity(4, monotonic=Times())
    assert all(is_let_through(capacity, "many", priority=1) for _ in range(4))
    assert not is_let_through(capacity, "many", 1)
    assert is_let_through(capacity, "many", 0), "more urgent than what is there"
    assert is_let_through(capacity, "few", 1) and is_let_through(capacity, "few", 1)
    assert is_let_through(capacity, "few", 1), "five against two"
    assert not is_let_through(capacity, "few", 2), "five against three, but the least urgent of all"


def test_refused_tenant_gets_one_through_for_each_request_that_ends() -> None:
    times = Times()
    capacity = RouterCapacity(100, monotonic=times)
    for _ in range(5):
        assert is_let_through(capacity)
    capacity.end("", 0, FULL)
    assert not is_let_through(capacity)
    assert not is_let_through(capacity, priority=7)
    assert is_let_through(capacity, priority=-1), "more urgent than what was refused"
    assert is_let_through(capacity, tenant="other")
    capacity.end("", 0, None)
    capacity.end("other", 0, None)
    assert [is_let_through(capacity) for _ in range(3)] == [True, True, False]
    # What other ingresses have seen end is not known here.
    times.now_s += PROBE_S
    assert [is_let_through(capacity) for _ in range(2)] == [True, False]


def test_refusal_here_says_what_the_router_said_and_when_to_come_back() -> None:
    times = Times()
    capacity = RouterCapacity(100, monotonic=times)
    for _ in range(41):
        capacity.begin("", 0)
    for _ in range(20):
        times.now_s += 0.5
        capacity.end("", 0, None)
    capacity.end("", 0, FULL)  # Of 41 there are 20 now.
    with pytest.raises(OverloadedError) as caught:
        capacity.check("", 0)
    assert caught.value.message == FULL.message
    # 20 are under way, and one ends every half second; spread by up to a half.
    assert 10.0 <= caught.value.retry_after_s <= 15.0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_requests_are_counted_until_they_end_however_they_end(is_stream: bool) -> None:
    capacity = RouterCapacity(100)
    router = FakeRouterClient(info=INFO, errors=[FULL, EngineLostError("lost")])
    admission = Admission(router, capacity, Places(100, timeout_s=60), NO_ADAPTERS)
    asked = (router, [request("t")], TOKENIZER)
    for number in range(3):
        try:
            if is_stream:
                _ = [delta async for delta in stream(*asked, timeout_s=60.0, entered=admission.entered)]
            else:
                await complete(*asked, timeout_s=60.0, entered=admission.entered)
        except OverloadedError:
            # Something has ended, or the next would not be asked for.
            capacity.begin("t", 0)
            capacity.end("t", 0, None)
        except EngineLostError:
            assert number == 1
    assert len(router.requests) == 3
    deltas = stream(*asked, timeout_s=60.0, entered=admission.entered)
    await anext(deltas)
    assert capacity.num_requests == 1
    await close(deltas)
    assert capacity.num_requests == 0


FULL_SIZES = {"target": {"max_num_seqs": 1}, "router": {"max_queued_requests": 1}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "a", "max_tokens": 4}', 429),
        (b'{"prompt": "a", "priority": null, "speculation": null}', 429),
        (b'{"prompt": "a", "priority": 3}', 429),
        (b'{"prompt": 5, "speculation": {"tenant": ""}}', 429),
        (b'{"prompt": "a", "priority": "x"}', 400),
        (b'{"prompt": "a", "priority": true}', 400),
        (b'{"prompt": "a", "speculation": 5}', 400),
        (b'{"prompt": "a", "speculation": {"tenant": 5}}', 400),
        (b"[1]", 400),
        (b"{no json", 400),
        (b"", 400),
        (b'{"prompt": "a", "max_tokens": 4, "n": 0, "speculation": {"tenant": "few"}}', 400),
    ],
)
async def test_full_service_refuses_what_it_understands_and_reads_the_rest_whole(
    body: bytes, status: int
) -> None:
    router = endless()
    config = parse_config({"served_model_name": MODEL, **FULL_SIZES})
    async with serving(router, config=config) as service:
        running = [asyncio.create_task(service.post("/v1/completions", TEXT)) for _ in range(2)]
        await wait_until(lambda: len(router.requests) == 2)
        headers = {"Content-Type": "application/json"}
        async with service.http.post("/v1/completions", data=body, headers=headers) as response:
            assert response.status == status
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_body_in_pieces_is_read_by_the_application_of_a_full_service() -> None:
    router = endless()
    config = parse_config({"served_model_name": MODEL, **FULL_SIZES})

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"prompt": "a", ', b'"priority": ', b"-1}"):
            yield piece
            await asyncio.sleep(0.02)

    async with serving(router, config=config) as service:
        tasks = [asyncio.create_task(service.post("/v1/completions", TEXT)) for _ in range(2)]
        await wait_until(lambda: len(router.requests) == 2)
        headers = {"Content-Type": "application/json"}
        late = service.http.post("/v1/completions", data=pieces(), headers=headers)
        tasks.append(asyncio.ensure_future(late))  # type: ignore[arg-type]
        await wait_until(lambda: len(router.requests) == 3)
        assert router.requests[-1].priority == -1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_call_over_http_is_not_tokenised_when_the_routers_are_known_to_be_full() -> None:
    router = endless()
    config = parse_config({"served_model_name": MODEL, **FULL_SIZES})
    async with serving(router, config=config) as service:
        running = [asyncio.create_task(service.post("/v1/completions", TEXT)) for _ in range(2)]
        await wait_until(lambda: len(router.requests) == 2)
        # A prompt that is too long would be a 400, if anybody had looked.
        status, answer = await service.post("/v1/completions", {**TEXT, "prompt": "x" * 500})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert answer["error"]["message"] == "2 requests are under way; allowed: 2"
        more_urgent = asyncio.create_task(service.post("/v1/completions", {**TEXT, "priority": -1}))
        await wait_until(lambda: len(router.requests) == 3)
        for task in (*running, more_urgent):
            task.cancel()
        await asyncio.gather(*running, more_urgent, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_in_hand_are_bounded_before_their_body_is_read(stream: bool) -> None:
    router = endless()
    config = parse_config({"served_model_name": MODEL, "ingress": {"max_ongoing_requests": 1}})
    async with serving(router, config=config) as service:
        running = asyncio.create_task(service.post("/v1/completions", {**TEXT, "stream": stream}))
        await wait_until(lambda: len(router.requests) == 1)
        async with service.http.post("/v1/completions", data=b"{no json" * 1000) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["message"] == "1 calls are in hand; allowed: 1"
        # The connection is still good, and a full service can be asked how it is.
        assert (await service.http.get("/health")).status == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await wait_until(lambda: len(router.aborted_request_ids) == 1)
        # The place is free again: the body is read, and is found wrong.
        assert (await service.post("/v1/completions", {"prompt": 5}))[0] == 400


async def call_without_server(app: Any, body: dict[str, Any], *, reads: bool) -> list[Any]:
    """What the application sends; a client that does not read is cut off after the headers."""
    sent: list[Any] = []
    is_cut = asyncio.Event()
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await is_cut.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if not reads:
            is_cut.set()
            await asyncio.sleep(0.01)  # As a server does until the connection is closed.

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    await app({**scope, "headers": headers}, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_reads_nothing_loses_its_place_and_its_request_is_aborted(stream: bool) -> None:
    router = FakeRouterClient(info=INFO)
    client = Admission(router, RouterCapacity(1), Places(1, timeout_s=60), NO_ADAPTERS)
    config = parse_config({"served_model_name": MODEL})
    app = build_http_app(client=client, tokenizer=TOKENIZER, config=config)
    assert len(await call_without_server(app, {**TEXT, "stream": stream}, reads=False)) == (
        1 if stream else 2
    )
    assert router.aborted_request_ids == ([router.requests[0].request_id] if stream else [])
    assert client.capacity.num_requests == 0
    start, *_ = await call_without_server(app, TEXT, reads=True)
    assert start["status"] == 200


@pytest.mark.parametrize(("max_replicas", "most"), [(None, 4), (2, 8)])
async def test_call_for_more_than_all_routers_hold_is_wrong_and_not_early(
    max_replicas: int | None, most: int
) -> None:
    scaling = None if max_replicas is None else {"min_replicas": 1, "max_replicas": max_replicas}
    router = {"max_queued_requests": 3, "autoscaling": scaling}
    sizes = {"served_model_name": MODEL, "target": {"max_num_seqs": 1}, "router": router}
    client = FakeRouterClient(info=INFO)
    async with serving(client, config=parse_config(sizes)) as service:
        body = {**TEXT, "prompt": ["a", "b"]}
        status, answer = await service.post("/v1/completions", {**body, "n": most // 2 + 1})
        assert (status, answer["error"]["param"]) == (400, "n")
        message = f"number of prompts times n is {most + 2}; allowed: 1..{most}"
        assert answer["error"]["message"] == message
        assert client.requests == []
        assert (await service.post("/v1/completions", {**body, "n": most // 2}))[0] == 200
        assert len(client.requests) == most
