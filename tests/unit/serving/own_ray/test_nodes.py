"""Tests of what a Ray node of our own is told of its agents, and which processes it starts."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    wait_for_persisted_port,
)

from specray.serving.own_ray import absent_agent, nodes
from specray.serving.own_ray.nodes import PORTS, choose_ports, lean_head, one_agent
from tests.processes import is_running, wait_gone

NODE_ID = "ab" * 28
ABSENT = {
    "metrics_agent_port": METRICS_AGENT_PORT_NAME,
    "dashboard_agent_listen_port": DASHBOARD_AGENT_LISTEN_PORT_NAME,
    "metrics_export_port": METRICS_EXPORT_PORT_NAME,
}
"""Parameters of a node for the agent that it does not have, and the names of their files."""
STARTS = ("start_gcs_server", "start_monitor", "start_api_server", "start_log_monitor", "start_raylet")


@pytest.fixture
def taken() -> Any:
    """A port on which somebody listens, of the same machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(nodes, "PORTS", _Numbers(taken, free))
    assert choose_ports(1) == [free]
    with pytest.raises(OSError, match="fewer than 2 are free"):
        choose_ports(2)


class _Numbers(tuple[int, ...]):
    """Port numbers to choose from."""

    def __new__(cls, *numbers: int) -> _Numbers:
        return super().__new__(cls, numbers)

    @property
    def start(self) -> int:
        return min(self)

    @property
    def stop(self) -> int:
        return max(self) + 1


def test_a_node_knows_its_agent_and_what_it_does_not_have_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Any, ...]] = []

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        # What a node waits for when it is not told.
        told = [
            wait_for_persisted_port(str(tmp_path), NODE_ID, name, timeout_ms=0) for name in ABSENT.values()
        ]
        asked = [getattr(node._ray_params, name) for name in ABSENT]
        seen.append((args, kwargs, told, asked, node._ray_params.runtime_env_agent_port))

    monkeypatch.setattr(Node, "start_raylet", start_raylet)
    node: Any = SimpleNamespace(_ray_params=RayParams(), _session_dir=str(tmp_path), _node_id=NODE_ID)
    with one_agent():
        Node.start_raylet(node, "plasma", object_store_memory=1)
    ((args, kwargs, told, asked, port),) = seen
    assert (args, kwargs) == (("plasma",), {"object_store_memory": 1})
    assert (told, asked) == ([-1, -1, -1], [0, 0, 0])
    assert port in PORTS


def test_a_script_has_the_place_of_the_dashboards_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda *args, **kwargs: seen.append((args, kwargs)))
    command = ["raylet", "--dashboard_agent_command=python agent.py --minimal", "--head"]
    with one_agent():
        services.start_ray_process(command, "raylet", fate_share=True)
    services.start_ray_process(command, "raylet", fate_share=True)
    script = f"--dashboard_agent_command={sys.executable} -I -S {absent_agent.__file__}"
    assert seen == [
        ((["raylet", script, "--head"], "raylet"), {"fate_share": True}),
        ((command, "raylet"), {"fate_share": True}),
    ]


@pytest.mark.slow
def test_that_script_ends_with_the_raylet() -> None:
    raylet = (
        "import os, subprocess, sys; os.environ['RAY_RAYLET_PID'] = str(os.getpid());"
        "print(subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1]]).pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", raylet, absent_agent.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        time.sleep(2 * absent_agent.PERIOD_S)
        assert is_running(agent)
        process.kill()
    assert wait_gone(agent)


def test_other_nodes_of_the_process_start_as_ray_starts_them() -> None:
    before = (Node.start_raylet, services.start_ray_process)
    with pytest.raises(ZeroDivisionError), one_agent():
        assert Node.start_raylet is not before[0]
        raise ZeroDivisionError
    assert (Node.start_raylet, services.start_ray_process) == before


def test_a_ray_of_another_version_starts_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    before = (Node.start_raylet, services.start_ray_process)
    with one_agent():
        assert (Node.start_raylet, services.start_ray_process) == before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Methods of a node that have started a process."""
    found: list[str] = []

    def recorded(name: str) -> Any:
        return lambda node, **options: found.append(name)

    for name in STARTS:
        monkeypatch.setattr(Node, name, recorded(name))
    yield found


def start_all(node: Any) -> None:
    """Calls the methods as a node does."""
    Node.start_gcs_server(node)
    Node.start_monitor(node)
    Node.start_api_server(node, include_dashboard=False, raise_on_failure=False)
    Node.start_log_monitor(node)
    Node.start_raylet(node)  # type: ignore[call-arg]


@pytest.mark.parametrize("log_to_driver", [False, True])
def test_a_head_has_no_processes_that_nobody_asks(started: list[str], log_to_driver: bool) -> None:
    with lean_head(log_to_driver=log_to_driver):
        start_all(None)
    log_monitor = ["start_log_monitor"] if log_to_driver else []
    assert started == ["start_gcs_server", *log_monitor, "start_raylet"]


def test_other_nodes_of_the_process_have_all_processes(started: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), lean_head(log_to_driver=False):
        raise ZeroDivisionError
    start_all(None)
    assert started == list(STARTS)


def test_a_ray_of_another_version_has_all_processes(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    with lean_head(log_to_driver=False):
        start_all(None)
    assert started == list(STARTS)
