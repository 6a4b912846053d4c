"""Tests of the relay that stands for a network: it adds latency and nothing else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from specray.bench.overlap.relay import relay

DELAY_MS = 30.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data.upper())
    writer.close()


async def test_bytes_come_in_order_and_no_sooner_than_both_delays() -> None:
    with tempfile.TemporaryDirectory(prefix="sr-") as directory:
        path = str(Path(directory, "s"))
        server = await asyncio.start_unix_server(echo, path)
        with relay(path, delay_ms=DELAY_MS) as link:
            host, port = link.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            started = time.monotonic()
            for part in (b"one ", b"two ", b"three"):
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(10.0):
                got = await reader.readexactly(13)
            assert time.monotonic() - started >= 2 * DELAY_MS / 1e3
            assert got == b"ONE TWO THREE"
            assert link.num_bytes == 26
            writer.write_eof()
            async with asyncio.timeout(10.0):
                assert await reader.read() == b""
            writer.close()
        server.close()
