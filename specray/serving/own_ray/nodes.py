"""Ray nodes of our own: room for their files, an agent's port chosen ahead, no process that nobody asks."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from specray.environment import ray_directory
from specray.errors import ConfigError
from specray.serving.own_ray import absent_agent

PORTS = range(20_000, 32_768)
"""Port numbers to choose from: below those that Linux gives to whoever asks for any."""

_MIN_FREE_BYTES = 128_000_000
"""Bytes that logs, sockets and the memory map of a small service take."""
_DASHBOARD_AGENT = "--dashboard_agent_command="
_KNOWN_RAY = "2.60."
"""Prefix of the Ray versions whose nodes are known; others start as they do by themselves."""


def check_room() -> None:
    """Checks the directory of Ray's sessions.

    Without room there, Ray's first process waits two minutes and then says nothing of a disk.

    Raises:
        ConfigError: it does not exist, or its disk is nearly full.
    """
    directory = ray_directory()
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(f"{directory}, for Ray's files, cannot be used: {error.strerror}") from None
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"{directory}, for Ray's files, has {free / 1e6:.0f} MB free; "
            f"allowed: {_MIN_FREE_BYTES / 1e6:.0f} MB or more, or another directory (TMPDIR)"
        )


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
def one_agent() -> Iterator[None]:
    """Lets the Ray nodes that this process starts in the block have one agent, on a port chosen here.

    Without this and ``lean_head`` a start of Ray takes 4.1 s instead of 1.1, 3.2 s more processor time, and
    its processes hold 238 MB more 20 s later (medians of three starts in turns, 2 cores, Ray 2.60).

    The agent for runtime environments is enough. The other one, the dashboard's, shows logs and Ray's own
    metrics to whoever asks that node: 3 s of processor time at the start, some more as long as it measures
    all processes, and 110 MB. A node without it is told what Ray's minimal installation tells it, in which
    nobody exports metrics either; a script that does nothing has its place.

    An agent that chooses its own port writes it to a file, and Ray 2.60 ends with an "unexpected system
    state" if a file is not there after 15 s: a constant (``WaitForPersistedPort``), unlike the deadlines that
    environment variables set. Agents import for seconds of processor time; on a machine with five times the
    load that takes longer. Nobody waits for a port that is known, and the node is there sooner.

    ``ray.init`` has no parameters for them.
    """
    if not is_known_ray():
        # What is wrapped here is not public.
        yield
        return
    from ray import _raylet
    from ray._private import node as ray_node
    from ray._private import services as ray_services

    node_class: Any = ray_node.Node
    raylet: Any = _raylet
    services: Any = ray_services
    start_raylet, start_process = node_class.start_raylet, services.start_ray_process

    def start_with_one_agent(node: Any, *args: Any, **kwargs: Any) -> None:
        (port,) = choose_ports(1)
        node._ray_params.update(
            runtime_env_agent_port=port,
            metrics_agent_port=0,
            dashboard_agent_listen_port=0,
            metrics_export_port=0,
        )
        for name in (
            raylet.METRICS_AGENT_PORT_NAME,
            raylet.METRICS_EXPORT_PORT_NAME,
            raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        ):
            # What Ray's minimal installation writes for an agent that does not listen.
            raylet.persist_port(node._session_dir, node._node_id, name, -1)
        start_raylet(node, *args, **kwargs)

    def start_without_dashboard_agent(command: list[str], *args: Any, **kwargs: Any) -> Any:
        stands_in = subprocess.list2cmdline([sys.executable, "-I", "-S", absent_agent.__file__])
        return start_process(
            [
                f"{_DASHBOARD_AGENT}{stands_in}" if part.startswith(_DASHBOARD_AGENT) else part
                for part in command
            ],
            *args,
            **kwargs,
        )

    node_class.start_raylet = start_with_one_agent
    services.start_ray_process = start_without_dashboard_agent
    try:
        yield
    finally:
        node_class.start_raylet = start_raylet
        services.start_ray_process = start_process


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


def _start_nothing(node: object, **options: object) -> None: ...
