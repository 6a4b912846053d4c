"""Environment variables: what the service reads, and what it sets for Ray, threads and collectives."""

from __future__ import annotations

import os
import secrets
import sys
from types import MappingProxyType

from specray.config import LoggingConfig, RpcConfig
from specray.errors import ConfigError

SERVE_MESSAGE_BYTES = 64 * 1024 * 1024
"""Most of what Serve's processes send each other over gRPC at once, a request's body among it."""
RAY_ENVIRONMENT = MappingProxyType(
    {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_CONF": "narenas:1,tcache:false",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(SERVE_MESSAGE_BYTES),
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    }
)
"""What every Ray that runs specray is to find, ours, a test bed's and the container image's.

Its processes have 30 to 40 threads each, to which glibc gives up to eight heaps per core: under a constant
load a Router grew by 1 MiB a minute, all of it free, and by nothing with two. Ray's own programs use jemalloc
with caches: idle, a raylet grew from 10.2 to 13 MiB in 4 minutes; without them it stays at 6.9.

Serve's processes call each other over gRPC instead of through actor calls: that halves what a chunk of a
stream costs them (measured, 32 streams on 2 cores: 12.7 to 6.5 s of processor time for 8,400 tokens).

Serve's controller looks at its deployments ten times a second unless told otherwise: with nothing to do it
and the GCS that it asks take 5 % of a core, and 3 % at four times a second.
"""


def log_level(logging: LoggingConfig | None = None) -> str:
    """``logging.level``, else ``SPECRAY_LOG_LEVEL``, else INFO. Raises ConfigError for an unknown level."""
    if logging is not None and logging.level is not None:
        return logging.level
    level = os.environ.get("SPECRAY_LOG_LEVEL", "INFO").upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ConfigError(f"SPECRAY_LOG_LEVEL is {level!r}; allowed: DEBUG, INFO, WARNING, ERROR")
    return level


def api_key() -> str | None:
    """``SPECRAY_API_KEY``: what our own clients send to a server that asks for a key."""
    return os.environ.get("SPECRAY_API_KEY") or None


def external_ray_address() -> str | None:
    """``RAY_ADDRESS``: the cluster to join instead of starting one."""
    return os.environ.get("RAY_ADDRESS") or None


def apply_ray_environment(rpc: RpcConfig) -> None:
    """Sets what a Ray of our own must find in the environment, for this process and all that descend from it.

    Ray asks for a token of this cluster alone, unless RAY_AUTH_MODE says otherwise: in the environment it
    leaves no file in the user's home. And it listens on loopback, unless the streams of the engines are to be
    reached from elsewhere: what Ray does on systems where it supports no clusters. It reads both when it is
    imported; a process that has done so already keeps what Ray chose.

    Ray's workers would have a nice value of 15: whatever else runs on the machine stops the service. Measured
    on 2 cores at ten times the load, refusals within 100 ms: 86 % at 15, with a median of 8 ms; 98.5 % at 0,
    with a median of 1 ms.

    Ray waits 30 s for its first process to name its port. On a busy machine that has been too short, once.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if rpc.listen == "loopback":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def thread_environment() -> dict[str, str]:
    """What an engine process must find in its environment before torch is loaded.

    GNU OpenMP's threads spin for milliseconds at the end of every parallel region. When another process wants
    one of their cores, each of the hundreds of regions of a forward then waits for a time slice of the
    scheduler: measured on 2 cores with one of them busy, a forward of a 200M target took 768 ms with the
    default, 22 ms with this count. Whoever sets either variable has decided otherwise.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return {}
    return {"GOMP_SPINCOUNT": "10000"}


def rank_environment(rpc: RpcConfig) -> dict[str, str]:
    """What a rank of a target must find in its environment: that of threads, and where its group meets.

    Left alone, gloo listens on whatever address the machine's name stands for, which others may reach.
    """
    is_loopback = sys.platform == "linux" and rpc.listen == "loopback"
    return thread_environment() | (interface_environment("lo") if is_loopback else {})


def interface_environment(interface: str) -> dict[str, str]:
    """What makes the collectives of a group use one network interface, unless the user has said which."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ}


def apply_interface_environment(interface: str) -> None:
    """Sets :func:`interface_environment` for this process; of use before it joins a group."""
    os.environ.update(interface_environment(interface))


def apply_thread_environment() -> None:
    """Sets :func:`thread_environment` for this process; of use before torch is imported."""
    os.environ.update(thread_environment())
