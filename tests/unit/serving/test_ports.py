"""Tests of claims on ports: processes of one service share them, another service is refused."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import pytest

from specray.errors import ConfigError
from specray.serving import ports
from specray.serving.ports import claimed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="claims are abstract sockets, of Linux alone")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def claim(port: int, service: str, host: str = "127.0.0.1") -> contextlib.AbstractContextManager[None]:
    return claimed("grpc.port", host, port, service=service)


def test_processes_of_one_service_share_a_port_and_another_service_is_refused(port: int) -> None:
    with claim(port, "b"):
        with claim(port, "b"), claim(port, "b", "localhost"), claim(port + 1, "c"):
            pass
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            with (
                pytest.raises(
                    ConfigError, match=rf"grpc.port: cannot listen on {host}:{port}: Address already"
                ),
                claim(port, "a", host),
            ):
                pass
        # Its refusal leaves no claim.
        with claim(port, "b"), claim(port, "c", "127.0.0.2"):
            pass
    with claim(port, "a", "0.0.0.0"), pytest.raises(ConfigError), claim(port, "b"):
        pass


@pytest.mark.parametrize("later", ["a", "b", "c"])
def test_one_of_several_that_come_at_the_same_time_gets_the_port(
    port: int, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have bound their claims when the first of them looks."""
    bound, left = threading.Barrier(3), threading.Event()
    others = ports.other_claims
    seen = threading.local()

    def look(*args: object) -> list[str]:
        if not hasattr(seen, "is_bound"):
            seen.is_bound = True
            bound.wait(30)
        return others(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ports, "other_claims", look)
    got: list[str] = []
    refused: list[str] = []

    def run(service: str) -> None:
        try:
            with claim(port, service):
                got.append(service)
                left.wait(30)
        except ConfigError:
            refused.append(service)
            if len(refused) == 2:
                left.set()

    threads = [threading.Thread(target=run, args=(name,)) for name in sorted("abc", key=lambda x: x == later)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (got, sorted(refused)) == (["c"], ["a", "b"])
