"""Servers listen on their own address only, and on other than loopback only when configured."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from pathlib import Path

import pytest

from specray.actors.node import listen_address
from specray.config import Config, parse_config
from specray.environment import rank_environment, thread_environment
from specray.rpc.inference.server import InferenceServer
from specray.rpc.workers.server import engine_server
from tests.rpc.engines import ScriptedDraft, ScriptedHandler


def own_listeners() -> set[str]:
    """Local TCP addresses on which this process listens, in the kernel's format."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            inodes |= {match[1]} if match else set()
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and words[9] in inodes}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def test_nothing_listens_beyond_the_machine_by_default() -> None:
    config = Config()
    assert (config.http.host, config.grpc.host, config.rpc.listen) == ("127.0.0.1", "127.0.0.1", "loopback")
    assert listen_address(config, "target").startswith("unix:")


async def test_servers_and_the_meeting_of_ranks_listen_on_their_own_address_only() -> None:
    parallel = pytest.importorskip("specray.engine.group.parallel")
    before = own_listeners()
    assert before <= LOOPBACK
    public = InferenceServer(ScriptedHandler(), "127.0.0.1:0")
    worker = engine_server(ScriptedDraft, role="draft", address="127.0.0.1:0")
    await public.start()
    await worker.start()
    try:
        store = parallel.GroupStore("127.0.0.1", timeout_s=5)
        assert own_listeners() and own_listeners() <= LOOPBACK
        follower = await asyncio.to_thread(parallel.connect_store, store.address, store.store.timeout)
        follower.set("a", "b")
        assert store.store.get("a") == b"b"
    finally:
        await worker.stop(0.0)
        await public.stop(0.0)


def test_the_check_of_listeners_sees_a_wildcard() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert "00000000" in own_listeners()


async def test_an_open_worker_beyond_the_machine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for address, is_warned in (("0.0.0.0:0", True), ("127.0.0.1:0", False)):
        caplog.clear()
        server = engine_server(ScriptedDraft, role="draft", address=address)
        await server.start()
        await server.stop(0.0)
        assert ("serves whoever reaches it: set rpc.tls" in caplog.text) is is_warned


def test_the_ranks_of_one_machine_meet_on_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    node = parse_config({"rpc": {"listen": "node", "allow_insecure": True}}).rpc
    assert rank_environment(Config().rpc)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(node)
    assert rank_environment(node) == thread_environment()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(Config().rpc)
