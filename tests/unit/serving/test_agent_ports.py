"""Tests of the ports that a Ray node's agents are given, of which the node need not wait to hear."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, wait_for_persisted_port

from specray.serving import agent_ports
from specray.serving.agent_ports import PORTS, choose_ports, chosen_agent_ports

NODE_ID = "ab" * 28
NAMES = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")


@pytest.fixture
def taken() -> Any:
    """A port on which somebody listens, of the same machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(agent_ports, "PORTS", _Numbers(taken, free))
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


def test_a_node_knows_its_agents_ports_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Any, ...]] = []

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        # What a node waits for when it is not told.
        told = wait_for_persisted_port(str(tmp_path), NODE_ID, DASHBOARD_AGENT_LISTEN_PORT_NAME, timeout_ms=0)
        seen.append((args, kwargs, told, [getattr(node._ray_params, name) for name in NAMES]))

    monkeypatch.setattr(Node, "start_raylet", start_raylet)
    node: Any = SimpleNamespace(_ray_params=RayParams(), _session_dir=str(tmp_path), _node_id=NODE_ID)
    with chosen_agent_ports():
        Node.start_raylet(node, "plasma", object_store_memory=1)
    ((args, kwargs, told, ports),) = seen
    assert (args, kwargs) == (("plasma",), {"object_store_memory": 1})
    assert len(set(ports)) == 4 and all(port in PORTS for port in ports)
    assert told == ports[NAMES.index("dashboard_agent_listen_port")]


def test_other_nodes_of_the_process_start_as_ray_starts_them() -> None:
    before = Node.start_raylet
    with pytest.raises(ZeroDivisionError), chosen_agent_ports():
        assert Node.start_raylet is not before
        raise ZeroDivisionError
    assert Node.start_raylet is before


def test_a_ray_of_another_version_starts_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    before = Node.start_raylet
    with chosen_agent_ports():
        assert Node.start_raylet is before
