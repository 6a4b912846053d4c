"""Ports of a Ray node's agents, chosen before the node starts, so that it need not wait to learn them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PORTS = range(20_000, 32_768)
"""Port numbers to choose from: below those that Linux gives to whoever asks for any."""

_KNOWN_RAY = "2.60."
"""Prefix of the Ray versions whose nodes are known to take the ports so; others choose their own."""


def choose_ports(count: int) -> list[int]:
    """Returns ports on which nobody listens now, in random order: another Ray may choose at the same time.

    Raises:
        OSError: there are too few.
    """
    chosen: list[int] = []
    for port in random.Random().sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise OSError(f"of the ports {PORTS.start} to {PORTS.stop - 1}, fewer than {count} are free")


@contextmanager
def chosen_agent_ports() -> Iterator[None]:
    """Lets the Ray nodes that this process starts in the block have agents on ports that are chosen here.

    An agent that chooses its own port writes it to a file, and Ray 2.60 ends with an "unexpected system
    state" if a file is not there after 15 s: a constant (``WaitForPersistedPort``), unlike the deadlines that
    environment variables set. Agents import for 4 s of processor time; on a machine with five times the load
    that takes longer. Nobody waits for a port that is known, and the node is there sooner.

    ``ray.init`` has no parameters for them. One port has none in Ray's own program for a node either: its
    file is written here, before the agent writes the same.
    """
    import ray

    if not ray.__version__.startswith(_KNOWN_RAY):
        # What is wrapped here is not public.
        yield
        return
    from ray import _raylet
    from ray._private import node as ray_node

    node_class: Any = ray_node.Node
    raylet: Any = _raylet
    start_raylet = node_class.start_raylet

    def start_with_ports(node: Any, *args: Any, **kwargs: Any) -> None:
        grpc, http, runtime_env, metrics = choose_ports(4)
        node._ray_params.update(
            metrics_agent_port=grpc,
            dashboard_agent_listen_port=http,
            runtime_env_agent_port=runtime_env,
            metrics_export_port=metrics,
        )
        raylet.persist_port(node._session_dir, node._node_id, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, http)
        start_raylet(node, *args, **kwargs)

    node_class.start_raylet = start_with_ports
    try:
        yield
    finally:
        node_class.start_raylet = start_raylet
