"""Starts a service under test on a test bed, and offers the faults that are possible there.

- ``processes``: one Ray node, as ``specray serve`` starts it; its processes can be killed and stopped.
- ``cluster``: two Ray nodes that share this machine's address; the draft's can be removed too.
- ``namespaces``: real separate hosts; the draft's cable can also be pulled, slow or lossy.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.bench.compare.peers.process import LOOPBACK, free_port
from specray.bench.testbed.control import DRAFT_RESOURCE, TARGET_RESOURCE
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.netns import Network, entered
from specray.bench.testbed.ray_host import RayHost
from specray.bench.testbed.service import Control, controlled
from specray.bench.testbed.tree import adopting
from specray.config import Config
from specray.environment import RAY_ENVIRONMENT
from specray.errors import EngineLostError

GCS_PORT = 6379
DRAIN_TIMEOUT_S = 90.0
JOIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The draft's nodes, which can be lost and replaced, or drained and replaced."""

    remove: Callable[[], Awaitable[None]]
    """Removes the oldest node, with all its processes at once."""
    add: Callable[[], Awaitable[None]]
    """Tries once to add a node. Raises EngineLostError, and leaves nothing of it."""
    count: Callable[[], Awaitable[int]]

    async def join(self) -> None:
        """Adds a node. On a busy machine a start times out within Ray; it is tried again for JOIN_TIMEOUT_S.

        Raises:
            EngineLostError: it did not start in that time.
        """
        end_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                return await self.add()
            except EngineLostError:
                if time.monotonic() > end_s:
                    raise
            await asyncio.sleep(1.0)

    async def restore(self) -> None:
        """Makes it one node again, whatever a fault has left. Raises EngineLostError."""
        if await self.count() == 0:
            await self.join()
        while await self.count() > 1:
            await self.remove()

    async def replace(self, control: Control, node_id: str) -> None:
        """Adds a node, drains the one with this id, and removes it when no part is left on it.

        Raises:
            EngineLostError: parts stay there.
        """
        await self.join()
        await control.call("drain", node_id)
        end_s = time.monotonic() + DRAIN_TIMEOUT_S
        while any(part.node_id == node_id for part in await control.parts()):
            if time.monotonic() > end_s:
                raise EngineLostError(f"parts were left on a drained node after {DRAIN_TIMEOUT_S:g} s")
            await asyncio.sleep(0.5)
        await self.remove()


@dataclass(frozen=True, slots=True)
class DraftCable:
    set_up: Callable[[bool], Awaitable[None]]
    impair: Callable[[float, float], Awaitable[None]]
    """Sets the delay in milliseconds, each way, and the probability that a frame is lost; 0 and 0: sound."""


@dataclass(frozen=True, slots=True)
class Bed:
    kind: BedKind
    config: Config
    control: Control
    directory: Path
    """Directory of its configuration, its output and Ray's own logs."""
    nodes: Nodes | None = None
    link: DraftCable | None = None
    prefix: tuple[str, ...] = ()
    """Prefix of a command that runs it where the service listens."""

    async def restore(self) -> None:
        """Ends what a fault has left of nodes and cables. Raises EngineLostError."""
        if self.link is not None:
            await self.link.set_up(True)
            await self.link.impair(0.0, 0.0)
        if self.nodes is not None:
            await self.nodes.restore()

    @property
    def url(self) -> str:
        return f"http://{self.config.http.host}:{self.config.http.port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.config.grpc.host}:{self.config.grpc.port}"


@asynccontextmanager
async def open_bed(
    kind: BedKind, config: Config, *, seed: int = 0, directory: Path | None = None
) -> AsyncIterator[Bed]:
    """Runs the service while the block runs; then ends every process that it started.

    Args:
        kind: kind of the bed.
        config: configuration of the service; hosts, ports and placement are set by the bed.
        seed: seed of the frames that a lossy cable loses.
        directory: directory to keep; default: a temporary one.

    Raises:
        ConfigError: this machine cannot do it, or the configuration is wrong.
        EngineLostError: the service did not start.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="srb-")))
        stack.enter_context(adopting())
        # A short path: names of sockets below it may have 107 bytes.
        ray_directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="srb-", ignore_cleanup_errors=True))
        )
        # Separate from any other Ray on this machine.
        environment = {
            "RAY_TMPDIR": str(ray_directory),
            "RAY_ADDRESS": "",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            # As in the container image.
            **RAY_ENVIRONMENT,
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            # Ray's agent keeps its metrics of every worker that has ever died; nobody reads them here.
            "RAY_enable_metrics_collection": "0",
            # Serve's own files have a line per call; it need not come through Ray as well.
            "RAY_SERVE_LOG_TO_STDERR": "0",
        }
        if kind is BedKind.NAMESPACES:
            hosts = _namespaces(config, directory, ray_directory, environment, seed)
        else:
            hosts = _one_address(kind, config, directory, environment)
        async with hosts as bed:
            yield bed


@asynccontextmanager
async def _one_address(
    kind: BedKind, config: Config, directory: Path, environment: dict[str, str]
) -> AsyncIterator[Bed]:
    is_cluster = kind is BedKind.CLUSTER
    config = with_ports(config, LOOPBACK, free_port(), free_port())
    if is_cluster:
        config = with_placement(config)
    mode = "cluster" if is_cluster else "local"
    async with controlled(config, mode=mode, directory=directory, environment=environment) as control:

        async def remove() -> None:
            await control.call("remove_node")

        async def add() -> None:
            await control.call("add_node", timeout_s=120.0)

        async def count() -> int:
            return int(await control.call("num_nodes"))

        yield Bed(kind, config, control, directory, Nodes(remove, add, count) if is_cluster else None)


@asynccontextmanager
async def _namespaces(
    config: Config, directory: Path, ray_directory: Path, environment: dict[str, str], seed: int
) -> AsyncIterator[Bed]:
    with Network(("head", "draft", "client"), impairable="draft", seed=seed) as network:
        head, draft = network.hosts["head"], network.hosts["draft"]
        config = with_ports(with_placement(config, listen="node"), head.address, 8000, 9000)
        gcs = f"{head.address}:{GCS_PORT}"
        common = {"environment": environment, "directory": directory, "ray_directory": ray_directory}
        head_node = RayHost(head, resources={TARGET_RESOURCE: 1}, head_port=GCS_PORT, **common)  # type: ignore[arg-type]
        draft_node = RayHost(draft, resources={DRAFT_RESOURCE: 1}, head_address=gcs, **common)  # type: ignore[arg-type]

        async def set_up(is_up: bool) -> None:
            await asyncio.to_thread(network.set_link, draft.name, is_up=is_up)

        async def impair(delay_ms: float, loss: float) -> None:
            await asyncio.to_thread(lambda: network.impair(delay_ms=delay_ms, loss=loss))

        async def remove() -> None:
            await asyncio.to_thread(draft_node.end_oldest)

        async def count() -> int:
            return draft_node.num_running

        await head_node.start()
        await draft_node.start()
        joined = {**environment, "RAY_ADDRESS": gcs}
        with entered(network.hosts["client"].namespace):
            async with controlled(
                config, mode="join", directory=directory, environment=joined, prefix=head.command()
            ) as control:
                yield Bed(
                    BedKind.NAMESPACES,
                    config,
                    control,
                    directory,
                    Nodes(remove, draft_node.start, count),
                    DraftCable(set_up, impair),
                    head.command(),
                )


def with_ports(config: Config, host: str, http_port: int, grpc_port: int) -> Config:
    """Lets the Ingress listen itself, as for `specray serve`: its server is under test, not Serve's proxy."""
    http = {"host": host, "port": http_port, "server": "ingress"}
    return config.model_copy(
        update={
            "http": config.http.model_copy(update=http),
            "grpc": config.grpc.model_copy(update={"host": host, "port": grpc_port}),
        }
    )


def with_placement(config: Config, *, listen: str = "loopback") -> Config:
    """Places drafts on the draft's node, and everything else on the other."""

    def on(options: dict[str, Any], resource: str) -> dict[str, Any]:
        return {**options, "resources": {resource: 0.001}}

    target, draft, ingress = config.target, config.draft, config.ingress
    return config.model_copy(
        update={
            "target": target.model_copy(
                update={"ray_actor_options": on(target.ray_actor_options, TARGET_RESOURCE)}
            ),
            "draft": draft.model_copy(
                update={"ray_actor_options": on(draft.ray_actor_options, DRAFT_RESOURCE)}
            ),
            "ingress": ingress.model_copy(
                update={"ray_actor_options": on(ingress.ray_actor_options, TARGET_RESOURCE)}
            ),
            # Nobody else is on the network of namespaces.
            "rpc": config.rpc.model_copy(update={"listen": listen, "allow_insecure": listen == "node"}),
        }
    )
