"""Keeps the ports of one service apart from those of another, although its own processes may share them.

With SO_REUSEPORT the kernel deals the connections of a port out to all who listen on it, whoever they are:
two services on one port would answer each other's clients, with each other's keys. So every process that is
to listen claims the port in its service's name first.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from specray.errors import ConfigError

_POLL_S: Final = 0.05
_ANY: Final = frozenset({"0.0.0.0", "::"})
_PREFIX: Final = "specray-port"


@contextmanager
def claimed(field: str, host: str, port: int, *, service: str) -> Iterator[None]:
    """Claims a port for a process of a service while the block runs.

    A claim is an abstract unix socket: it needs no file, ends with its process, and belongs to the network
    namespace, as ports do. Other systems than Linux have none; nothing is claimed there.

    Args:
        field: field of the configuration, for the message.
        service: id of the service, at most 30 characters without a slash.

    Raises:
        ConfigError: a process of another service has claimed it, on this address or one that includes it.
    """
    if sys.platform != "linux":
        yield
        return
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        claim.bind(f"\0{_PREFIX}/{port}/{address}/{service}/{secrets.token_hex(4)}")
        # Of two that come at the same time, each sees the other, and one of them waits for the other's end.
        # Seconds in which one of two services that claim a port at the same time gives way to the other.
        end_s = time.monotonic() + 2.0
        while others := other_claims(port, str(address), service):
            if max(others) > service or time.monotonic() > end_s:
                raise ConfigError(
                    f"{field}: cannot listen on {host}:{port}: Address already in use, by another service of "
                    "specray"
                )
            time.sleep(_POLL_S)
        yield


def other_claims(port: int, address: str, service: str) -> list[str]:
    found = []
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines():
        with suppress(ValueError):
            prefix, claimed_port, claimed_address, owner, _ = line.rpartition(" ")[2].split("/")
            overlaps = address == claimed_address or not _ANY.isdisjoint((address, claimed_address))
            if (prefix, claimed_port) == (f"@{_PREFIX}", str(port)) and overlaps and owner != service:
                found.append(owner)
    return found
