"""Ray nodes of our own: ports of agents chosen before a node starts, and no processes that nobody asks."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PORTS = range(20_000, 32_768)
"""Port numbers to choose from: below those that Linux gives to whoever asks for any."""

_KNOWN_RAY = "2.60."
"""Prefix of the Ray versions whose nodes are known; others start as they do by themselves."""


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


def is_known_ray() -> bool:
    """True if Ray has the version whose nodes are known to start with what this process changes of them."""
    import ray

    return ray.__version__.startswith(_KNOWN_RAY)


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
    if not is_known_ray():
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


@contextmanager
def lean_head(*, log_to_driver: bool = True) -> Iterator[None]:
    """Lets the Ray nodes that this process starts in the block have fewer processes.

    Without the dashboard's pages its server only reports usage of Ray, and the node starts after it: 2 s of
    processor time. The monitor is the autoscaler's, which has no nodes to add here: 1.2 s. The log monitor
    reads all logs to send them to the process that has started Ray: 1.5 s, and some more for each line.

    ``ray.init`` has no parameters for them.

    Args:
        log_to_driver: as ``ray.init`` is told; False: no log monitor.
    """
    if not is_known_ray():
        # What is replaced here is not public.
        yield
        return
    from ray._private import node as ray_node

    node_class: Any = ray_node.Node
    left_out = ["start_api_server", "start_monitor", *([] if log_to_driver else ["start_log_monitor"])]
    before = {name: getattr(node_class, name) for name in left_out}
    for name in left_out:
        setattr(node_class, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(node_class, name, start)


def _start_nothing(node: object, **options: object) -> None:
    """Stands for a method of a node that would start a process."""
