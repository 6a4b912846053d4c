"""Environment variables that the service uses, and those it sets for Ray, threads and collectives."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path
from types import MappingProxyType

from specray.config import LoggingConfig, RpcConfig
from specray.errors import ConfigError

RAY_ENVIRONMENT = MappingProxyType(
    {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_CONF": "narenas:1,tcache:false",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        # Maximum bytes of a gRPC message between Serve's processes, such as a request's body.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 1024 * 1024),
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "4",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
        "RAY_maximum_gcs_destroyed_actor_cached_count": "100",
        "RAY_maximum_gcs_dead_worker_cached_count": "100",
        "RAY_task_events_max_num_task_in_gcs": "1000",
    }
)
"""Environment of every Ray that runs specray: our own, a test bed's and the container image's.

Ray's processes have 30 to 40 threads each, and glibc makes up to eight heaps per core for them: under
constant load a Router grew by 1 MiB a minute, all of it free memory, and not at all with two heaps. Ray's own
programs use jemalloc with caches: an idle raylet grew from 10.2 to 13 MiB in 4 minutes; without caches it
stays at 6.9.

Serve's processes call each other over gRPC instead of actor calls, which halves the cost of a stream's chunk
(measured, 32 streams on 2 cores: 12.7 to 6.5 s of processor time for 8,400 tokens).

Serve's controller polls its deployments ten times a second by default: when idle, it and the GCS take 5 % of
a core, and 3 % at four times a second. Each event loop of Serve's, two in most processes, passes its figures
on ten times a second, though Ray exports them every ten seconds: 1 % of a core in an idle service.

A replica that fails its health checks is killed. By default it is asked to end first, for as long as a
healthy one may drain; one that hangs would hold its port for half a minute longer. Serve's proxy, where it
listens, is replaced after three checks as an Ingress is; by default they take a minute.

The GCS keeps the last 100 actors and workers that died, and the last 1,000 tasks (each call of an actor is
one), of which `ray list` shows 100 by default. It would keep 100,000 of each: at 12 KiB per killed actor and
3.4 KiB per task it grew by 15 MiB in an hour of soak, health checks alone making some tasks a second.
"""

OWN_RAY_ENVIRONMENT = MappingProxyType(
    {
        "RAY_task_events_report_interval_ms": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_memory_monitor_refresh_ms": "1000",
        "RAY_local_fs_monitor_interval_ms": "5000",
        "RAY_raylet_check_gc_period_milliseconds": "1000",
        "RAY_kill_idle_workers_interval_ms": "1000",
        "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
        "RAY_report_worker_backlog_interval_ms": "10000",
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "specray.serving.own_ray.seldom.ask_seldom",
    }
)
"""Environment of a Ray of our own beyond RAY_ENVIRONMENT: what it need not do, or not so often.

Nobody asks it for tasks, since there is no dashboard, or for its own metrics, since there is no agent that
would collect them; reporting tasks alone took 2 % of a core in an idle service. The raylet looks at memory,
disk and idle workers four to ten times a second by default. An autoscaler reads loads and backlogs; there is
none. Serve's controller asks for the nodes as ``own_ray.seldom`` says.
"""


def log_level(logging: LoggingConfig | None = None) -> str:
    """Log level: ``logging.level``, else ``SPECRAY_LOG_LEVEL``, else INFO. Raises ConfigError if unknown."""
    if logging is not None and logging.level is not None:
        return logging.level
    level = os.environ.get("SPECRAY_LOG_LEVEL", "INFO").upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ConfigError(f"SPECRAY_LOG_LEVEL is {level!r}; allowed: DEBUG, INFO, WARNING, ERROR")
    return level


def api_key() -> str | None:
    """API key (``SPECRAY_API_KEY``) that our own clients send to a server that requires one."""
    return os.environ.get("SPECRAY_API_KEY") or None


def external_ray_address() -> str | None:
    """Address (``RAY_ADDRESS``) of a Ray cluster to join instead of starting one."""
    return os.environ.get("RAY_ADDRESS") or None


def cache_directory() -> Path:
    """Directory of the user's cache for specray: under ``XDG_CACHE_HOME``, else ``~/.cache``.

    Raises:
        ConfigError: the user has no home directory.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if named.is_absolute():
        return named / "specray"
    try:
        return Path.home() / ".cache" / "specray"
    except RuntimeError:
        raise ConfigError("there is no home directory for a cache; allowed: XDG_CACHE_HOME") from None


def is_private(path: Path) -> bool:
    """Whether a path is a directory of this user, no link, that nobody else may enter. Raises OSError."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def ray_directory() -> Path:
    """Directory in which a Ray of our own stores its sessions, by Ray's rule."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def pip_environment() -> dict[str, str]:
    """Environment of pip, unless the user has set it: a machine without a network learns of it soon."""
    values = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}
    return {name: value for name, value in values.items() if name not in os.environ}


def apply_ray_environment(rpc: RpcConfig) -> None:
    """Sets the environment of our own Ray, for this process and its descendants.

    Ray requires a token of this cluster, unless RAY_AUTH_MODE says otherwise; passed in the environment, it
    leaves no file in the user's home. Ray listens on loopback, as on systems where it supports no clusters,
    unless engine streams must be reachable from other machines. Ray reads both at import; if it is already
    imported, they have no effect.

    Ray's workers would have a nice value of 15, so other load on the machine would stop the service. Measured
    on 2 cores at ten times the load, refusals within 100 ms: 86 % at 15, median 8 ms; 98.5 % at 0, median 1
    ms.

    Ray waits 30 s by default for its first process to report its port and for its agents to answer, and 60 s
    for a worker, which was too short on busy machines. A start whose first workers came too late waited for
    them without end.
    """
    for name, value in {**RAY_ENVIRONMENT, **OWN_RAY_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if rpc.listen == "loopback":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def thread_environment() -> dict[str, str]:
    """Environment that an engine process needs before torch is loaded.

    GNU OpenMP's threads spin for milliseconds at the end of every parallel region. If another process
    occupies one of their cores, each of a forward's hundreds of regions waits for a scheduler time slice:
    measured on 2 cores with one of them busy, a forward of a 200M target took 768 ms by default and 22 ms
    with this spin count. A user who sets either variable overrides this.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return {}
    return {"GOMP_SPINCOUNT": "10000"}


def rank_environment(rpc: RpcConfig) -> dict[str, str]:
    """Environment of a target's rank: that of threads, and the network interface of its group.

    By default, gloo listens on the address of the machine's host name, which others may reach.
    """
    is_loopback = sys.platform == "linux" and rpc.listen == "loopback"
    return thread_environment() | (interface_environment("lo") if is_loopback else {})


def interface_environment(interface: str) -> dict[str, str]:
    """Environment that makes a group's collectives use one network interface, unless the user chose one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ}


def apply_rank_environment(rpc: RpcConfig) -> None:
    """Sets :func:`rank_environment` for this process; call it before torch is imported.

    In a runtime environment of Ray's the same would cost a process 2 s: Ray asks an agent for it, imports
    itself once to enter it and once more within, and uses no process that it keeps ready.
    """
    os.environ.update(rank_environment(rpc))


def apply_interface_environment(interface: str) -> None:
    """Sets :func:`interface_environment` for this process; call it before joining a group."""
    os.environ.update(interface_environment(interface))


def apply_thread_environment() -> None:
    """Sets :func:`thread_environment` for this process; call it before torch is imported."""
    os.environ.update(thread_environment())
