"""Measures what load without a key costs others: the time of their requests, and the service's memory.

``python -m tests.edge_load [KIND ...]`` starts the HTTP server before a scripted router, and prints for each
kind of load the times of requests with a key, alone and under load in turns. Not a test: on a busy machine
the load's own process takes cores from the service. N: how many connections load it, 64 by default.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import uvloop

from specray.config import parse_config
from specray.demo.paths import demo_target_path
from specray.fakes import FakeRouterClient
from specray.requests import ServiceInfo
from specray.serving.admission.api_keys import key_hash
from specray.serving.http.app import build_http_app
from specray.serving.http.edge.connections import Connections
from specray.serving.http.server import HttpServer
from specray.tokenization import load_tokenizer

KEY = "sk-specray-measured"
NUM_CONNECTIONS = int(os.environ.get("N", "64"))
"""Connections that load the service at the same time."""
NUM_TURNS = 3
TURN_S = 3.0
CHUNK_INTERVAL_S = 0.02
NUM_TOKENS = 16

HOST = b"Host: x\r\n"
BODY = b'{"prompt": "def", "max_tokens": %d, "stream": true, "ignore_eos": true}' % NUM_TOKENS
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
ASKED = POST + b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (KEY.encode(), len(BODY)) + BODY
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
PIECE = 2**16 * b"a"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def refused(port: int) -> None:
    """Requests without a key, one after the other on one connection."""
    await repeated(port, POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)


async def upgrades(port: int) -> None:
    """The same, each offering an upgrade."""
    await repeated(port, POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)


async def probes(port: int) -> None:
    """Requests for /health, which needs no key."""
    await repeated(port, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")


async def ahead(port: int) -> None:
    """Requests sent ahead as fast as they are taken."""
    reader, writer = await connected(port)
    sending = asyncio.create_task(endless(writer, 200 * (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n")))
    try:
        while await reader.read(2**16):
            pass
    finally:
        sending.cancel()


async def unread(port: int) -> None:
    """The same, but nobody reads the answers."""
    _, writer = await connected(port)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await endless(writer, 200 * (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"))


async def connections(port: int) -> None:
    """Connections as fast as they are taken, each with half a head."""
    held: list[asyncio.StreamWriter] = []
    while True:
        writer = (await connected(port))[1]
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nA: " + 8000 * b"a")
        held.append(writer)
        if len(held) > 100:
            held.pop(0).transport.abort()


async def heads(port: int) -> None:
    """Heads without an end."""
    await endless((await connected(port))[1], PIECE, first=b"GET / HTTP/1.1\r\nHost: x\r\nA: ")


async def headers(port: int) -> None:
    """Headers without an end."""
    await endless((await connected(port))[1], 8192 * b"a: b\r\n", first=b"GET / HTTP/1.1\r\nHost: x\r\n")


async def bodies(port: int) -> None:
    """Bodies without an end, without a key."""
    await endless((await connected(port))[1], PIECE, first=POST + b"Content-Length: 1000000000\r\n\r\n")


async def chunks(port: int) -> None:
    """Chunks of one byte, without a key."""
    await endless(
        (await connected(port))[1], 8192 * b"1\r\na\r\n", first=POST + b"Transfer-Encoding: chunked\r\n\r\n"
    )


KINDS: dict[str, Callable[[int], Awaitable[None]]] = {
    each.__name__: each
    for each in (refused, upgrades, probes, ahead, unread, connections, heads, headers, bodies, chunks)
}


async def connected(port: int) -> Peer:
    return await asyncio.open_connection("127.0.0.1", port)


async def repeated(port: int, request: bytes) -> None:
    reader, writer = await connected(port)
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))


async def endless(writer: asyncio.StreamWriter, piece: bytes, *, first: bytes = b"") -> None:
    writer.write(first)
    while True:
        writer.write(piece)
        await writer.drain()


def load(pipe: Pipe, kind: str, port: int) -> None:
    """Puts this load on the service until its process is ended."""

    async def again() -> None:
        while True:
            with suppress(OSError, EOFError, asyncio.LimitOverrunError):
                await KINDS[kind](port)

    async def run() -> None:
        pipe.send(kind)
        await asyncio.gather(*(again() for _ in range(NUM_CONNECTIONS)))

    uvloop.run(run())


class RealClock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def serve(pipe: Pipe) -> None:
    """Serves until its process is ended."""

    async def run() -> None:
        tokenizer = load_tokenizer(demo_target_path())
        info = ServiceInfo("m", "d", tokenizer.vocab_size, 2048, 1, "0")
        router = FakeRouterClient(info=info, clock=RealClock(), chunk_interval_s=CHUNK_INTERVAL_S)
        keys = {"keys": [{"name": "a", "sha256": key_hash(KEY)}]}
        config = parse_config({"served_model_name": "m", "auth": keys})
        app = build_http_app(client=router, tokenizer=tokenizer, config=config)
        bounds = Connections(config.http.max_connections)
        server = HttpServer(app, host="127.0.0.1", port=0, connections=bounds)
        await server.start()
        pipe.send(server.port)
        await asyncio.Event().wait()

    uvloop.run(run())


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[int]:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child.pid or 0
    finally:
        child.kill()
        child.join()


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def times(port: int) -> list[float]:
    """Milliseconds of whole streams with a key, each on a connection of its own, for one turn."""
    found = []
    end = time.monotonic() + TURN_S
    while time.monotonic() < end:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(ASKED)
            answer = b""
            while b"[DONE]" not in answer:
                part = sock.recv(65536)
                assert part, answer[:200]
                answer += part
        found.append(1e3 * (time.monotonic() - began))
    return found


def main(kinds: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    for kind in kinds:
        ours, theirs = context.Pipe()
        with process(serve, theirs) as pid:
            port = ours.recv()
            times(port)
            before = most = resident_mib(pid)
            alone: list[float] = []
            under: list[float] = []
            for _ in range(NUM_TURNS):
                alone += times(port)
                with process(load, theirs, kind, port):
                    ours.recv()
                    time.sleep(1.0)
                    under += times(port)
                    most = max(most, resident_mib(pid))
                time.sleep(0.5)
            usual, loaded = statistics.median(alone), statistics.median(under)
            print(
                f"{kind:12} alone p50 {usual:6.0f} ms, under load {loaded:6.0f} ms, {loaded / usual:.2f} x; "
                f"slowest {max(alone):.0f}, {max(under):.0f} ms; memory +{most - before:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
