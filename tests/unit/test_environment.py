"""Environment of our own Ray: a token for this cluster alone, and loopback."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from specray.config import RpcConfig
from specray.environment import RAY_ENVIRONMENT, apply_ray_environment

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty environment, in a process that has not imported Ray."""
    values: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", values)
    monkeypatch.setattr(
        sys, "modules", {name: module for name, module in sys.modules.items() if name != "ray"}
    )
    return values


def decided(environment: dict[str, str]) -> dict[str, str]:
    """Variables of the environment that decide who reaches Ray."""
    prefixes = ("RAY_AUTH_", *LOOPBACK)
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def test_a_token_of_its_own_and_loopback(environment: dict[str, str]) -> None:
    apply_ray_environment(RpcConfig())
    token = environment.pop("RAY_AUTH_TOKEN")
    assert len(bytes.fromhex(token)) == 32
    assert decided(environment) == {"RAY_AUTH_MODE": "token"} | LOOPBACK


def test_a_second_service_of_the_process_keeps_the_token_that_ray_has_read(
    environment: dict[str, str],
) -> None:
    apply_ray_environment(RpcConfig())
    before = dict(environment)
    apply_ray_environment(RpcConfig())
    assert environment == before


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "disabled"),
        ({"RAY_AUTH_MODE": "token"}, "token"),
        ({"RAY_AUTH_TOKEN": "mine"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "/a/file"}, "token"),
    ],
    ids=lambda value: str(value),
)
def test_what_the_user_decided_stays(environment: dict[str, str], given: dict[str, str], mode: str) -> None:
    environment.update(given)
    apply_ray_environment(RpcConfig())
    assert decided(environment) == given | {"RAY_AUTH_MODE": mode} | LOOPBACK


def test_engines_that_others_reach_leave_ray_on_the_network(environment: dict[str, str]) -> None:
    apply_ray_environment(RpcConfig(listen="node", allow_insecure=True))
    assert decided(environment).keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


def test_a_ray_that_was_imported_before_reads_only_the_token(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", pytest)
    apply_ray_environment(RpcConfig())
    assert decided(environment).keys() == {"RAY_AUTH_TOKEN"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "2"),
        ("MALLOC_CONF", "narenas:1,tcache:false"),
        ("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1"),
        ("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "67108864"),
        ("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25"),
        ("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1"),
        ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1"),
        ("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "4"),
        ("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "10000"),
        ("RAY_maximum_gcs_destroyed_actor_cached_count", "100"),
        ("RAY_maximum_gcs_dead_worker_cached_count", "100"),
        ("RAY_task_events_max_num_task_in_gcs", "1000"),
        ("RAY_task_events_report_interval_ms", "0"),
        ("RAY_enable_metrics_collection", "0"),
        ("RAY_memory_monitor_refresh_ms", "1000"),
        ("RAY_worker_niceness", "0"),
        ("RAY_gcs_server_port_wait_time_s", "120"),
        ("RAY_agent_register_timeout_ms", "120000"),
        ("RAY_worker_register_timeout_seconds", "300"),
    ],
)
def test_what_ray_does_unless_the_user_wants_it_otherwise(
    environment: dict[str, str], name: str, value: str
) -> None:
    apply_ray_environment(RpcConfig())
    assert environment[name] == value
    environment[name] = "other"
    apply_ray_environment(RpcConfig())
    assert environment[name] == "other"


def test_the_image_has_what_a_ray_of_our_own_finds() -> None:
    text = (Path(__file__).parents[2] / "cluster" / "Dockerfile").read_text(encoding="utf-8")
    variables = re.findall(r"^(?:ENV|   ) ([A-Za-z_]+)=(\S+)", text, flags=re.MULTILINE)
    assert RAY_ENVIRONMENT.items() <= dict(variables).items()
