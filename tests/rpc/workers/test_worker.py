"""Workers as processes and as threads inside an actor."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specray.draft_tokens import DraftTokens
from specray.errors import ConfigError, EngineLostError
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.rpc.workers.worker import EngineServerThread
from specray.types import Proposal, Verdict
from tests.rpc.engines import ScriptedDraft, ScriptedTarget, is_there, speculate, verify
from tests.rpc.workers.harness import DEADLINE_S, ask, within

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def worker_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker process, and its address from the first output line."""
    command = [sys.executable, "-m", "tests.rpc.workers.worker_process", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(("specray draft worker listens on ", "loading")), line
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
async def test_killed_worker_is_engine_lost_and_not_a_hang(address: str) -> None:
    with worker_process(address) as (process, _):
        drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        await ask(drafter, speculate("a"))
        pending = asyncio.create_task(drafter.replies())
        await asyncio.sleep(0)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(EngineLostError, match="draft at unix:"):
            await within(pending)
        with pytest.raises(EngineLostError):
            await drafter.speculate([speculate("a")])
        assert drafter.is_lost
        with pytest.raises(EngineLostError):
            await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        await drafter.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_a_worker_with_its_socket(number: int, address: str, socket_path: Path) -> None:
    with worker_process(address) as (process, printed):
        assert printed == address
        drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        process.send_signal(number)
        with pytest.raises(EngineLostError, match="the worker is stopping"):
            await within(drafter.replies())
        await drafter.close()
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
    assert not is_there(socket_path)


@pytest.mark.slow
def test_signal_ends_a_worker_that_still_loads(address: str) -> None:
    with worker_process(address, "60") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow
async def test_worker_reports_the_real_port() -> None:
    with worker_process("127.0.0.1:0") as (_, printed):
        host, port = printed.rsplit(":", 1)
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        drafter = await GrpcDrafter.connect(printed, timeout_s=DEADLINE_S)
        replies = await ask(drafter, speculate("a"))
        assert replies.replies == (Proposal("a", 0, 0, DraftTokens((4, 5))),)
        await drafter.close()


async def test_server_thread_serves_checks_and_stops(address: str, socket_path: Path) -> None:
    engine = ScriptedTarget()
    thread = EngineServerThread(lambda: engine, role="target", address=address)
    assert not thread.is_alive
    assert await asyncio.to_thread(thread.start, timeout_s=DEADLINE_S) == address
    assert thread.is_alive
    await asyncio.to_thread(thread.check, timeout_s=DEADLINE_S)
    verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    await verifier.verify([verify("a", draft=(4, 7))])
    replies = await within(verifier.replies())
    assert replies.replies == (Verdict("a", 0, 0, 1, 5),)
    await asyncio.to_thread(thread.stop, grace_s=1.0)
    with pytest.raises(EngineLostError):
        await within(verifier.replies())
    await verifier.close()
    assert not thread.is_alive
    assert not is_there(socket_path)
    thread.stop()
    with pytest.raises(EngineLostError, match="does not run"):
        thread.check(timeout_s=DEADLINE_S)


async def test_address_in_use_is_a_config_error_before_the_engine_is_built(address: str) -> None:
    first = EngineServerThread(ScriptedDraft, role="draft", address=address)
    await asyncio.to_thread(first.start, timeout_s=DEADLINE_S)
    built: list[ScriptedDraft] = []

    def build() -> ScriptedDraft:
        built.append(ScriptedDraft())
        return built[-1]

    second = EngineServerThread(build, role="draft", address=address)
    with pytest.raises(ConfigError, match="Address already in use"):
        await asyncio.to_thread(second.start, timeout_s=DEADLINE_S)
    assert not second.is_alive
    assert built == []
    drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
    await drafter.close()
    await asyncio.to_thread(first.stop, grace_s=1.0)


async def test_slow_engine_is_lost_at_the_start_deadline(address: str) -> None:
    engine = ScriptedDraft()
    engine.gate.clear()

    def build() -> ScriptedDraft:
        assert engine.gate.wait(DEADLINE_S)
        return engine

    thread = EngineServerThread(build, role="draft", address=address)
    with pytest.raises(EngineLostError, match=r"was not loaded within 0\.05 s"):
        await asyncio.to_thread(thread.start, timeout_s=0.05)
    engine.gate.set()
    assert not thread.is_alive
