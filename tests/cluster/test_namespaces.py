"""Tests of network namespaces as hosts: they reach each other and nothing else, and cables can be
impaired."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specray.bench.testbed.netns import (
    Network,
    entered,
    has_netem,
    impairment_obstacles,
    obstacles,
    process_ids,
    remove_leftovers,
)
from specray.errors import ConfigError

LACKING = (*obstacles(), *([] if obstacles() else impairment_obstacles()))
needs_hosts = pytest.mark.skipif(bool(LACKING), reason=f"this machine lacks {', '.join(LACKING)}")

PORT = 7000
ECHO = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.send(data)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(("head", "draft"), impairable="draft", seed=1) as network:
        yield network


@contextlib.contextmanager
def echoing(network: Network, host: str) -> Iterator[int]:
    command = network.hosts[host].command(sys.executable, "-c", ECHO)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def connected(network: Network, source: str, target: str) -> Iterator[socket.socket]:
    with (
        entered(network.hosts[source].namespace),
        socket.create_connection((network.hosts[target].address, PORT), 10) as connection,
    ):
        yield connection


def answers(connection: socket.socket, *, timeout_s: float) -> bool:
    connection.settimeout(timeout_s)
    with contextlib.suppress(TimeoutError):
        connection.send(b"x")
        return connection.recv(1) == b"x"
    return False


@needs_hosts
def test_hosts_reach_each_other_and_a_pulled_cable_cuts_one_off(network: Network) -> None:
    with echoing(network, "draft") as pid, connected(network, "head", "draft") as connection:
        assert pid in process_ids(network.hosts["draft"].namespace)
        assert answers(connection, timeout_s=10)
        network.set_link("draft", is_up=False)
        assert not answers(connection, timeout_s=0.5)
        network.set_link("draft", is_up=True)
        # TCP repeats what was lost.
        connection.settimeout(30)
        assert connection.recv(1) == b"x"
        assert answers(connection, timeout_s=10)


@needs_hosts
def test_nothing_leads_out_of_the_network(network: Network) -> None:
    with socket.create_server(("0.0.0.0", 0)) as outside:
        port = outside.getsockname()[1]
        with entered(network.hosts["head"].namespace):
            for address in ("127.0.0.1", _own_address()):
                with pytest.raises(OSError):
                    socket.create_connection((address, port), 0.5)


@needs_hosts
def test_a_lost_cable_loses_everything_and_a_sound_one_nothing(network: Network) -> None:
    with echoing(network, "draft"), connected(network, "head", "draft") as connection:
        network.impair(loss=1.0)
        assert not answers(connection, timeout_s=0.5)
        network.impair(delay_ms=5)
        connection.settimeout(30)
        assert connection.recv(1) == b"x"
        network.impair()
        assert answers(connection, timeout_s=10)


@needs_hosts
def test_everything_is_gone_afterwards_processes_too() -> None:
    with Network(("head",)) as network:
        namespace = network.hosts["head"].namespace
        assert Path(f"/run/netns/{namespace}").exists()
        command = network.hosts["head"].command("sh", "-c", "echo; exec sleep 60")
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        # Until then it may be on its way into the namespace.
        assert process.stdout.readline() == b"\n"
    assert process.wait(10) == -9
    process.stdout.close()
    assert not Path(f"/run/netns/{namespace}").exists()


@needs_hosts
def test_namespaces_of_a_run_that_was_killed_are_removed() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True, check=True
    )
    name = f"specray-{int(child.stdout)}-0-head"
    subprocess.run(("ip", "netns", "add", name), check=True)
    remove_leftovers()
    assert not Path(f"/run/netns/{name}").exists()


@needs_hosts
def test_a_block_inside_a_namespace_ends_outside_it(network: Network) -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    with entered(network.hosts["head"].namespace):
        assert Path("/proc/thread-self/ns/net").readlink() != before
    assert Path("/proc/thread-self/ns/net").readlink() == before


def test_a_machine_that_cannot_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.bench.testbed.netns.capabilities", lambda: 0)
    with (
        pytest.raises(ConfigError, match="need root, or CAP_NET_ADMIN and CAP_SYS_ADMIN"),
        Network(("head",)),
    ):
        pass


@needs_hosts
def test_netem_is_asked_for_without_harm() -> None:
    assert has_netem() in (True, False)
    assert not list(Path("/run/netns").glob("specray-*netem*"))


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
