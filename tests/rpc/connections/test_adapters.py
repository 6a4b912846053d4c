"""Loads of adapters over gRPC, beside the stream of items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specray.errors import EngineLostError, InvalidRequestError, OverloadedError
from specray.fakes import FakeAdapterTarget, FakeTarget, ToyModel
from specray.fakes.adapters import FakeLoading
from specray.rpc.connection import GrpcVerifier
from specray.rpc.workers.server import engine_server
from tests.rpc.engines import verify

DEADLINE_S = 10.0
SQL, CHAT = b"s" * 32, b"c" * 32


@asynccontextmanager
async def connected(target: FakeTarget, directory: Path) -> AsyncIterator[GrpcVerifier]:
    address = f"unix:{directory}/target"
    server = engine_server(lambda: target, role="target", address=address)
    await server.start()
    verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    try:
        yield verifier
    finally:
        await verifier.close()
        await server.stop(0.5)


async def test_an_adapter_is_loaded_named_and_unloaded(tmp_path: Path) -> None:
    target = FakeAdapterTarget(ToyModel(), folders={"sql": SQL, "chat": CHAT}, max_adapters=1)
    async with connected(target, tmp_path) as verifier:
        assert verifier.info.max_adapters == 1
        assert await verifier.load_adapter("sql") == SQL
        assert await verifier.load_adapter("sql", SQL) == SQL
        info = await verifier.fetch_info()
        assert (info.adapters, info.adapter_names, info.max_adapter_rank) == ((SQL,), ("sql",), 16)
        with pytest.raises(OverloadedError, match="1 adapters are loaded; allowed: 1"):
            await verifier.load_adapter("chat")
        await verifier.unload_adapter(SQL)
        await verifier.unload_adapter(SQL)
        assert await verifier.load_adapter("chat") == CHAT
        assert target.num_loads == 2


async def test_refusals_are_sentences_and_the_stream_goes_on(tmp_path: Path) -> None:
    target = FakeAdapterTarget(ToyModel(), folders={"sql": SQL})
    async with connected(target, tmp_path) as verifier:
        for folder, digest, reason in (
            ("../etc", b"", "'../etc' is not in the directory"),
            ("sql", CHAT, "'sql' has other bytes now"),
        ):
            with pytest.raises(InvalidRequestError, match=reason) as refused:
                await verifier.load_adapter(folder, digest)
            assert refused.value.field == "adapter"
        assert not verifier.is_lost
        assert (await verifier.fetch_info()).adapters == ()


async def test_a_target_without_adapters_refuses(tmp_path: Path) -> None:
    async with connected(FakeTarget(ToyModel()), tmp_path) as verifier:
        assert (verifier.info.max_adapters, verifier.info.adapters) == (0, ())
        with pytest.raises(InvalidRequestError, match="this target knows no adapters"):
            await verifier.load_adapter("sql")


async def test_steps_go_on_while_files_are_read(tmp_path: Path) -> None:
    may_end = threading.Event()

    class Slow(FakeLoading):
        def read(self) -> None:
            assert may_end.wait(DEADLINE_S)

    class Reading(FakeAdapterTarget):
        def start_loading(self, folder: str, digest: bytes = b"") -> FakeLoading:
            return Slow(self, folder, digest)

    target = Reading(ToyModel(), folders={"sql": SQL})
    async with connected(target, tmp_path) as verifier:
        load = asyncio.create_task(verifier.load_adapter("sql"))
        for round_id in range(3):
            await verifier.verify([verify("a", round_id=round_id)])
            assert len((await asyncio.wait_for(verifier.replies(), DEADLINE_S)).replies) == 1
        # Nor is a second load lost that begins meanwhile.
        second = asyncio.create_task(verifier.load_adapter("sql"))
        assert not load.done() and (await verifier.fetch_info()).adapters == ()
        may_end.set()
        assert await asyncio.wait_for(asyncio.gather(load, second), DEADLINE_S) == [SQL, SQL]
        assert target.num_loads == 1


async def test_an_engine_that_breaks_while_it_loads_ends_the_connection(tmp_path: Path) -> None:
    class Breaking(FakeAdapterTarget):
        def place(self, folder: str, digest: bytes) -> bytes:
            raise RuntimeError("a rank is gone")

    async with connected(Breaking(ToyModel(), folders={}), tmp_path) as verifier:
        with pytest.raises(EngineLostError, match="the target engine is broken: RuntimeError"):
            await verifier.load_adapter("sql")
        with pytest.raises(EngineLostError):
            await verifier.replies()
