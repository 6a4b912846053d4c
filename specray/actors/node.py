"""This process's node."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import ray

from specray.config import Config
from specray.environment import apply_interface_environment
from specray.rpc.channel import MAX_SOCKET_PATH_BYTES

LOOPBACK = "127.0.0.1"


def keep_serve_on_loopback() -> None:
    """Called by a replica's constructor: where Ray itself is on loopback, so is what Serve opens next.

    Ray keeps to the node's address; only the port on which Serve's replicas call each other is opened on all
    of them, and there is no setting for that.
    """
    if str(ray.util.get_node_ip_address()) != LOOPBACK:
        return
    replica: Any = importlib.import_module("ray.serve._private.replica")
    open_port = replica.add_port_to_grpc_server

    def open_on_loopback(server: object, address: str) -> int:
        return int(open_port(server, address.replace("[::]", LOOPBACK)))

    replica.add_port_to_grpc_server = open_on_loopback


class LocalProcess:
    """A process of this node that can be ended even while it hangs; held by a descriptor where there are any.

    Ray ends an actor by asking it, and takes five seconds to be sure that a stopped one does not answer. A
    number alone may belong to another process by then.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        """Ends it at once; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)

    async def wait(self, timeout_s: float) -> None:
        """Returns when it has ended, after ``timeout_s`` at the latest.

        At once where there are no descriptors.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # A descriptor of a process can be read from when that has ended.
        loop.add_reader(descriptor, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout_s)
        finally:
            loop.remove_reader(descriptor)


def listen_host(config: Config) -> str:
    """Where this node meets others: nowhere beyond the machine unless asked."""
    return LOOPBACK if config.rpc.listen == "loopback" else str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None: there is none to be found."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # An interface without an IPv4 address.
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def meet_on_own_interface(config: Config) -> None:
    """Before this process joins a group: the group uses the interface on which this node meets others."""
    if config.rpc.listen == "node":
        # A machine may have interfaces on which the other nodes are not.
        interface = interface_of(listen_host(config))
        if interface is not None:
            apply_interface_environment(interface)


def listen_address(config: Config, role: str) -> str:
    """Where a worker on this node listens for its router; unused until then.

    Within one machine that is a unix socket: 0.06 ms less per round trip than TCP on the loopback, and only
    this user can connect to it.
    """
    if config.rpc.listen == "loopback":
        path = socket_directory(Path(tempfile.gettempdir())) / f"{role}-{uuid.uuid4().hex}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return f"unix:{path}"
    return f"{listen_host(config)}:0"


def socket_directory(parent: Path) -> Path:
    """This user's own directory for sockets under ``parent``: nobody else can enter it.

    One for all processes, so that those which are killed leave no directories behind. Should somebody else
    have made it first, a new one under another name.
    """
    path = parent / f"specray-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=stat.S_IRWXU)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return path
    return Path(tempfile.mkdtemp(prefix="specray-", dir=parent))
