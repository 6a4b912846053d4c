"""Bounds of connections: their number, their time, what of them is read, and upgrades that they offer."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send

from specray.serving.http.edge.connections import Connections, first_byte_at
from specray.serving.http.server import HttpServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Echo:
    """An application that answers with method, path and body of a request, as JSON; some paths differ.

    ``/early`` is answered before its body, ``/hold`` when ``release`` is set, ``/big`` with 64 MiB.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.release = asyncio.Event()
        self.has_left = asyncio.Event()
        self.has_answered = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = bytearray()
        more = scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.has_left.set()
                return
            body += message["body"]
            more = message["more_body"]
        if scope["path"] == "/hold":
            await self.release.wait()
        answer = [scope["method"], scope["path"], bytes(body).decode("utf-8", "replace")]
        text = json.dumps(answer).encode() if scope["path"] != "/big" else 64 * 2**20 * b"a"
        length = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": text})
        self.has_answered.set()


class Peer:
    """A client that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, data: bytes) -> tuple[int, Any]:
        """Sends bytes; returns status and decoded body of the next answer."""
        self._writer.write(data)
        return await self.answer()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, Any]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        return int(head.split(b" ")[1]), json.loads(await self._reader.readexactly(length))

    async def is_closed(self) -> bool:
        """Waits for the end, and tells whether nothing came before it."""
        with suppress(ConnectionError):
            return await self._reader.read() == b""
        return True

    def close(self) -> None:
        self._writer.close()


class Server:
    def __init__(self, app: Echo, connections: Connections, port: int) -> None:
        self.app, self.connections, self.port = app, connections, port
        self.peers: list[Peer] = []

    async def peer(self) -> Peer:
        """Connects, and waits until the server has noted it."""
        before = self.connections.num_accepted
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port, limit=2**20))
        self.peers.append(peer)
        await until(lambda: self.connections.num_accepted > before)
        return peer


@asynccontextmanager
async def serving(max_connections: int = 100, **options: Any) -> AsyncIterator[Server]:
    app, bounds = Echo(), Connections(max_connections, **options)
    http = HttpServer(app, host="127.0.0.1", port=0, grace_s=0, connections=bounds)
    await http.start()
    server = Server(app, bounds, http.port)
    try:
        async with asyncio.timeout(5):
            yield server
    finally:
        for peer in server.peers:
            peer.close()
        await http.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # What is watched has no event.
        await asyncio.sleep(0.001)


async def test_long_head_gets_its_answer_and_is_not_kept() -> None:
    async with serving() as server:
        peer = await server.peer()
        peer.send(b"GET / HTTP/1.1\r\nHost: x\r\nA: " + 2**18 * b"a")
        status, body = await peer.answer()
        assert (status, body["error"]["message"]) == (431, "a header is too long; allowed: 8192 bytes")
        assert body["error"]["code"] == "headers_too_large"
        peer = await server.peer()
        status, body = await peer.ask(b"GET /" + 2**18 * b"a")
        assert (status, body["error"]["code"]) == (414, "uri_too_long")
        assert server.app.scopes == []


async def test_endless_head_is_cut_off() -> None:
    async with serving() as server:
        peer = await server.peer()
        with pytest.raises(ConnectionError):
            for _ in range(64):
                peer.send(2**20 * b"a")
                await peer._writer.drain()


@pytest.mark.parametrize("start", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
async def test_head_that_does_not_come_ends_the_connection(start: bytes) -> None:
    async with serving(head_timeout_s=0.05) as server:
        peer = await server.peer()
        peer.send(start)
        if start:
            status, body = await peer.answer()
            assert (status, body["error"]["message"]) == (408, "the head did not arrive within 0.05 s")
        assert await peer.is_closed()


async def test_each_byte_of_a_head_does_not_give_it_more_time() -> None:
    async with serving(head_timeout_s=0.1) as server:
        peer = await server.peer()

        async def drip() -> None:
            for _ in range(10_000):
                peer.send(b"G")
                await asyncio.sleep(0.005)

        dripping = asyncio.create_task(drip())
        assert (await peer.answer())[0] == 408
        dripping.cancel()


async def test_part_of_a_later_head_has_the_same_time() -> None:
    async with serving() as server:
        peer = await server.peer()
        assert await peer.ask(GET) == (200, ["GET", "/", ""])
        server.connections.head_timeout_s = 0.05
        await asyncio.sleep(0.1)  # Without a byte of it, the connection may be kept.
        assert await peer.ask(GET) == (200, ["GET", "/", ""])
        assert (await peer.ask(b"G"))[0] == 408


async def test_kept_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.http.server.KEEP_ALIVE_TIMEOUT_S", 0.05)
    async with serving() as server:
        peer = await server.peer()
        assert (await peer.ask(GET))[0] == 200
        assert await peer.is_closed()


async def test_answered_request_whose_body_does_not_come_ends_the_connection() -> None:
    async with serving() as server:
        peer = await server.peer()
        server.connections.head_timeout_s = 0.05
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        assert (await peer.ask(head))[0] == 200
        assert await peer.is_closed()


async def test_rest_of_an_answered_request_is_read_up_to_1_mib() -> None:
    async with serving() as server:
        peer = await server.peer()
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        num_bytes = 2**20 - 2**15
        assert (await peer.ask(head % num_bytes))[0] == 200
        assert await peer.ask(num_bytes * b"a" + GET) == (200, ["GET", "/", ""])
        assert (await peer.ask(head % 2**22))[0] == 200
        peer.send(2**22 * b"a")
        assert await peer.is_closed()


@pytest.mark.parametrize("chunks", [2**17 * b"1\r\na\r\n", b"no chunk"], ids=["small", "malformed"])
async def test_chunks_that_nobody_asks_for_are_not_parsed(chunks: bytes) -> None:
    async with serving() as server:
        peer = await server.peer()
        peer.send(CHUNKED.replace(b"/", b"/early", 1) + chunks)
        assert (await peer.answer())[0] == 200
        assert await peer.is_closed()


async def test_longest_idle_connection_goes_for_a_new_one() -> None:
    async with serving(max_connections=3) as server:
        kept, fresh, busy = [await server.peer() for _ in range(3)]
        assert (await kept.ask(GET))[0] == 200  # So it is idle since a later time than the second.
        busy.send(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(server.app.scopes) == 2)
        await server.peer()
        assert await fresh.is_closed()
        await server.peer()
        assert await kept.is_closed()
        assert len(server.connections) == 3
        server.app.release.set()
        assert (await busy.answer())[0] == 200


async def test_new_connection_is_closed_where_none_is_idle() -> None:
    async with serving(max_connections=1) as server:
        busy = await server.peer()
        busy.send(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(server.app.scopes) == 1)
        assert await (await server.peer()).is_closed()
        server.app.release.set()
        assert (await busy.answer())[0] == 200
        assert await (await server.peer()).ask(GET) == (200, ["GET", "/", ""])


def test_last_descriptors_of_the_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    bounds = Connections(100)
    first, second, third, fourth, fifth = peers = [Mock() for _ in range(5)]
    assert [bounds.add(peer, descriptor=n) for peer, n in ((first, 830), (second, 831))] == [True, True]
    bounds.set_idle(second, True)
    bounds.set_idle(first, True)
    assert bounds.add(third, descriptor=832)  # Of 1024 the last 192 stay free.
    assert bounds.add(fourth, descriptor=833)  # The descriptors of both that went are not free yet.
    assert not bounds.add(fifth, descriptor=834)
    assert [peer.transport.abort.called for peer in peers] == [True, True, False, False, True]
    for gone in (first, second, fifth):
        bounds.remove(gone)
    bounds.set_idle(third, True)
    assert bounds.add(fifth, descriptor=831)
    assert not third.transport.abort.called
    assert len(bounds) == 3


UPGRADES = {
    "h2c, as the JDK's clients send it": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n",
    "one that nobody knows": b"Connection: keep-alive, upgrade\r\nUpgrade: foo/2, TLS/1.0\r\n",
}


@pytest.mark.parametrize("offer", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("is_apart", [False, True], ids=["one write", "head and body apart"])
async def test_offered_upgrade_is_ignored_and_the_body_read(offer: bytes, is_apart: bool) -> None:
    async with serving() as server:
        peer = await server.peer()
        for framing, body in (
            (b"Content-Length: 5\r\n\r\n", b"hello"),
            (b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
        ):
            head = b"POST /a HTTP/1.1\r\nHost: x\r\n" + offer + framing
            peer.send(head + (b"" if is_apart else body))
            if is_apart:
                await until(lambda: len(server.app.scopes) % 2 == 1)
                peer.send(body)
            assert await peer.answer() == (200, ["POST", "/a", "hello"])
            assert await peer.ask(GET) == (200, ["GET", "/", ""])
        assert await peer.ask(b"GET / HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n") == (200, ["GET", "/", ""])
        assert await peer.ask(GET) == (200, ["GET", "/", ""])


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    async with serving() as server:
        peer = await server.peer()
        paths = [f"/{n}" for n in range(300)]
        peer.send(b"".join(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode() for path in paths))
        assert [await peer.answer() for _ in paths] == [(200, ["GET", path, ""]) for path in paths]


async def test_request_sent_ahead_waits_unparsed() -> None:
    async with serving() as server:
        peer = await server.peer()
        peer.send(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n" + 1000 * GET)
        await until(lambda: len(server.app.scopes) == 1)
        await asyncio.sleep(0.05)
        assert len(server.app.scopes) == 1
        server.app.release.set()
        for path in ["/hold", *(1000 * ["/"])]:
            assert (await peer.answer())[1][1] == path


@pytest.mark.parametrize("end", [b"x\r\n", b"5\r\nab\r\n"], ids=["no size", "too short"])
async def test_malformed_body_is_refused_and_its_request_ended(end: bytes) -> None:
    async with serving() as server:
        peer = await server.peer()
        peer.send(CHUNKED + b"1\r\na\r\n")
        await until(lambda: len(server.app.scopes) == 1)
        peer.send(end + 20 * b"a")
        assert (await peer.answer())[0] == 400
        await server.app.has_left.wait()


async def test_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.http.edge.connections.UNREAD_TIMEOUT_S", 0.05)
    async with serving() as server:
        peer = await server.peer()
        peer._writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(server.app.scopes) == 1)
        await until(lambda: len(server.connections) == 0)
        await server.app.has_answered.wait()  # Nothing of the call waits for the client any longer.


async def test_scope_says_when_the_first_byte_came() -> None:
    async with serving() as server:
        loop = asyncio.get_running_loop()
        peer = await server.peer()
        before = loop.time()
        peer.send(GET[:1])
        await asyncio.sleep(0.1)
        between = loop.time()
        assert (await peer.ask(GET[1:]))[0] == 200
        assert before < first_byte_at(server.app.scopes[0]) < between
        assert (await peer.ask(GET))[0] == 200
        assert first_byte_at(server.app.scopes[1]) > between
        assert first_byte_at({"type": "http"}) >= first_byte_at(server.app.scopes[1])
