"""The connection of router and draft, which ``specray bench overlap`` can make slow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specray.bench.overlap.relay import relay
from specray.bench.testbed.netns import Network, entered
from specray.config import Config
from specray.serving.local.pair import DraftHost, LocalPair, local_pair

_RECEIVED, _SENT = 0, 8
"""Columns of /proc/net/dev after a device's name."""


class CountedLink(Protocol):
    """A connection of router and draft that counts its bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes so far, both ways: without IP and TCP headers for a relay, whole frames for a cable."""
        ...


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts with a cable between them; the calling thread is on the router's."""

    network: Network

    @property
    def draft(self) -> DraftHost:
        host = self.network.hosts["draft"]
        return DraftHost(f"{host.address}:7000", host.command())

    @property
    def num_bytes(self) -> int:
        """See CountedLink. Must be read on the thread that entered the router's host."""
        return bytes_of(Path("/proc/thread-self/net/dev").read_text(encoding="ascii"), "eth0")


def bytes_of(devices: str, name: str) -> int:
    """Returns the bytes that a device received and sent, from the text of /proc/net/dev."""
    counts = next(
        line.partition(":")[2].split() for line in devices.splitlines() if line.strip().startswith(f"{name}:")
    )
    return int(counts[_RECEIVED]) + int(counts[_SENT])


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Makes two hosts; while the block runs, this thread and those that it starts are on the router's.

    A process enters before gRPC starts its threads, which would stay where they are.

    Raises:
        ConfigError: the machine cannot do it; the message says what is missing.
    """
    with (
        Network(("router", "draft"), impairable="draft") as network,
        entered(network.hosts["router"].namespace),
    ):
        yield Hosts(network)


@asynccontextmanager
async def linked_pair(
    config: Config, *, delay_ms: float | None, hosts: Hosts | None = None
) -> AsyncIterator[tuple[LocalPair, CountedLink | None]]:
    """Starts a pair, and the link between its draft and the router, while the block runs.

    Args:
        config: configuration of the pair.
        delay_ms: delay each way, >= 0; None: a direct connection, and no link.
        hosts: hosts whose cable delays; None: a relay does.

    Raises:
        ConfigError, EngineLostError: see ``local_pair`` and ``relay``.
    """
    if delay_ms is None or not config.draft.has_model:
        async with local_pair(config) as pair:
            yield pair, None
    elif hosts is not None:
        hosts.network.impair(delay_ms=delay_ms)
        async with local_pair(config, draft_host=hosts.draft) as pair:
            yield pair, hosts
    else:
        async with local_pair(config) as pair:
            assert pair.draft is not None, "the pair has a draft model"
            with relay(pair.draft.removeprefix("unix:"), delay_ms=delay_ms) as link:
                yield replace(pair, draft=link.address), link
