"""The ingress's own HTTP server: how it starts and stops, and with whom it shares its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import aiohttp
import pytest

from specray.config import parse_config
from specray.errors import ConfigError
from specray.fakes import FakeRouterClient
from specray.serving.http.app import build_http_app
from specray.serving.http.server import HttpServer
from specray.serving.ingress import IngressReplica
from tests.unit.serving.http.service import MODEL, REPLY, TEXT, TOKENIZER, say


def http_server(router: FakeRouterClient, port: int = 0, **options: Any) -> HttpServer:
    config = parse_config({"served_model_name": MODEL})
    app = build_http_app(client=router, tokenizer=TOKENIZER, config=config)
    return HttpServer(app, host="127.0.0.1", port=port, **options)


async def test_server_streams_and_ends_with_its_connections() -> None:
    server = http_server(say(REPLY))
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={**TEXT, "stream": True}) as response:
            assert response.status == 200
            lines = [line async for line in response.content if line.startswith(b"data: {")]
    finally:
        await server.stop()
    assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)
    await server.stop()


async def test_two_replicas_may_share_a_port() -> None:
    first = http_server(say(REPLY), shares_port=True)
    await first.start()
    second = http_server(say(REPLY), first.port, shares_port=True)
    await second.start()
    await first.stop()
    async with aiohttp.ClientSession() as http:
        assert (await http.get(f"http://127.0.0.1:{second.port}/health")).status == 200
    await second.stop()


def sharing_socket(port: int = 0) -> socket.socket:
    """Listens as Serve's proxy does, which shares its port with whoever shares it too."""
    return socket.create_server(("127.0.0.1", port), reuse_port=True)


async def test_port_is_not_shared_with_a_proxy_that_would_share_it() -> None:
    with sharing_socket() as proxy, pytest.raises(ConfigError, match=r"http\.port: .*Address already in use"):
        await http_server(say(REPLY), proxy.getsockname()[1], port_wait_s=0.0).start()


@pytest.mark.parametrize(("num_replicas", "is_shared"), [(1, False), (2, True)])
async def test_only_several_replicas_share_their_port(num_replicas: int, is_shared: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    replica = IngressReplica.__new__(IngressReplica)
    replica._config = parse_config({"http": {"port": port}, "ingress": {"num_replicas": num_replicas}})
    server = replica._http_server(build_http_app_stub())
    await server.start()
    try:
        with contextlib.nullcontext() if is_shared else pytest.raises(OSError, match="in use"):
            sharing_socket(port).close()
    finally:
        await server.stop()


async def test_replica_waits_for_the_port_of_the_one_that_it_replaces() -> None:
    first = http_server(say(REPLY))
    await first.start()
    second = http_server(say(REPLY), first.port, port_wait_s=20.0)
    start = asyncio.create_task(second.start())
    await asyncio.sleep(0)
    assert not start.done()
    await first.stop()
    await start
    async with aiohttp.ClientSession() as http:
        assert (await http.get(f"http://127.0.0.1:{second.port}/health")).status == 200
    await second.stop()


async def test_port_of_another_program_is_a_config_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"http\.port: cannot listen on 127\.0\.0\.1"),
    ):
        await http_server(say(REPLY), other.getsockname()[1], port_wait_s=0.0).start()
    with pytest.raises(ConfigError, match=r"http\.host"):
        await HttpServer(build_http_app_stub(), host="no.such.host.invalid", port=0).start()


def build_http_app_stub() -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody calls")

    return app
