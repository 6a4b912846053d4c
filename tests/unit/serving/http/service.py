"""A real HTTP server in front of a scripted router, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI

from specray.config import Config, parse_config
from specray.config.live import LiveConfig
from specray.fakes import FakeRouterClient
from specray.interfaces import RouterClient
from specray.requests import GenerateRequest, ServiceInfo
from specray.serving.admission.capacity import Admission
from specray.serving.http.app import build_http_app
from specray.serving.http.edge.connections import Connections, protocol_class
from specray.serving.observe import CallObserver
from specray.tokenization import Tokenizer, make_stop_matcher
from tests.unit.tokenization.tiny_tokenizer import tiny_tokenizer

MODEL = "tiny"
TOKENIZER = tiny_tokenizer()
MAX_MODEL_LEN = 64
INFO = ServiceInfo("target", "draft", TOKENIZER.vocab_size, MAX_MODEL_LEN, 1, "0")
REPLY = "hello hello, a é\n"
TEXT = {"prompt": "a", "max_tokens": 4}
"""Body of a call for a completion."""


class RealClock:
    """interfaces.Clock on the running loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def say(text: str, *, then: tuple[int, ...] = ()) -> FakeRouterClient:
    """Makes a router that answers every request with this text, and then these tokens."""
    tokens = (*TOKENIZER.encode(text), *then)

    def reply(_: GenerateRequest) -> tuple[int, ...]:
        return tokens

    return FakeRouterClient(reply=reply, info=INFO, stop_matcher_factory=make_stop_matcher(TOKENIZER))


def endless(**options: object) -> FakeRouterClient:
    """Makes a router whose streams take a thousand seconds per chunk."""
    return FakeRouterClient(info=INFO, clock=RealClock(), chunk_interval_s=1000.0, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Returns status and decoded body."""
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(
    client: RouterClient | Admission,
    *,
    tokenizer: Tokenizer | None = None,
    config: Config | LiveConfig | None = None,
    observer: CallObserver | None = None,
) -> AsyncIterator[Service]:
    """Runs the application while the block runs; the tokenizer is the client's own if it has one."""
    tokenizer = tokenizer or getattr(client, "tokenizer", TOKENIZER)
    config = config or parse_config({"served_model_name": MODEL})
    app = build_http_app(client=client, tokenizer=tokenizer, config=config, observer=observer)
    async with running(app) as service:
        yield service


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[Service]:
    """Runs an application while the block runs."""
    protocol = protocol_class(Connections(64))
    options = uvicorn.Config(
        app, http=protocol, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none"
    )
    options.load()
    server = uvicorn.Server(options)
    server.lifespan = options.lifespan_class(options)
    await server.startup()
    # The headers of every answer. Its own loop looks ten times a second whether it is to end.
    await server.on_tick(0)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:
            yield Service(f"http://127.0.0.1:{port}", http)
    finally:
        await _end(server)


async def _end(server: uvicorn.Server) -> None:
    """As uvicorn ends that is forced to: what is under way has a tenth of a second, or less if it ends."""
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            while server.server_state.connections or server.server_state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until the condition holds; fails after 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # What is watched has no event.
            await asyncio.sleep(0.005)


async def events_of(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the decoded events of a stream, without the [DONE] that must end it."""
    async with service.http.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = (await response.read()).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def typed_events_of(
    service: Service, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[Any]:
    """Returns the decoded events of a stream whose events have names; the name is the event's type."""
    async with service.http.post(path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *parts, end = (await response.read()).decode().split("\n\n")
    assert end == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
