"""A slow network on one machine: a TCP relay that passes everything on after a fixed time, each way.

It is a process of its own, so that its work delays nobody. Bytes keep their order and their spacing: it adds
latency alone, as distance does.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from specray.errors import EngineLostError
from specray.rpc.event_loop import new_event_loop

START_TIMEOUT_S = 20.0
_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Relay:
    address: str
    """Address that leads to the server behind the relay, later."""
    _num_bytes: Any

    @property
    def num_bytes(self) -> int:
        """Bytes passed on so far, both ways, without IP and TCP headers."""
        return int(self._num_bytes.value)


@contextmanager
def relay(unix_path: str, *, delay_ms: float) -> Iterator[Relay]:
    """Relays to a unix socket while the block runs.

    Args:
        unix_path: path of the socket.
        delay_ms: delay each way, >= 0.

    Raises:
        EngineLostError: the process did not start in time.
    """
    context = multiprocessing.get_context("spawn")
    num_bytes = context.Value("q", 0)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_main, args=(unix_path, delay_ms / 1e3, num_bytes, sender), name="specray-relay", daemon=True
    )
    process.start()
    try:
        if not receiver.poll(START_TIMEOUT_S):
            raise EngineLostError(f"the relay did not start within {START_TIMEOUT_S:g} s")
        yield Relay(f"{_HOST}:{receiver.recv()}", num_bytes)
    finally:
        process.terminate()
        process.join(START_TIMEOUT_S)


def _main(unix_path: str, delay_s: float, num_bytes: Any, ready: Connection) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(unix_path, delay_s, num_bytes, ready))


async def _serve(unix_path: str, delay_s: float, num_bytes: Any, ready: Connection) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(unix_path)
        await asyncio.gather(
            _pass_on(reader, back_writer, delay_s, num_bytes),
            _pass_on(back_reader, writer, delay_s, num_bytes),
        )

    server = await asyncio.start_server(connected, _HOST, 0)
    ready.send(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, num_bytes: Any
) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(_CHUNK_BYTES):
        num_bytes.value += len(data)
        loop.call_later(delay_s, writer.write, data)
    loop.call_later(delay_s, writer.close)
