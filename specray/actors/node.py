"""This process's node: its addresses, network interface, sockets and processes."""

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
import time
import uuid
from pathlib import Path
from typing import Any

import ray

from specray.config import Config
from specray.environment import apply_interface_environment, is_private
from specray.rpc.channel import MAX_SOCKET_PATH_BYTES

LOOPBACK = "127.0.0.1"


def keep_serve_on_loopback() -> None:
    """Makes Serve's next port listen on loopback if Ray itself does; called by a replica's constructor.

    Ray listens on the node's address, but Serve opens the port for calls between replicas on all addresses,
    and has no setting for that.
    """
    if str(ray.util.get_node_ip_address()) != LOOPBACK:
        return
    replica: Any = importlib.import_module("ray.serve._private.replica")
    open_port = replica.add_port_to_grpc_server

    def open_on_loopback(server: object, address: str) -> int:
        return int(open_port(server, address.replace("[::]", LOOPBACK)))

    replica.add_port_to_grpc_server = open_on_loopback


def memory_bytes() -> int:
    """Bytes of memory of this process, of what it shares with others a part (Linux's Pss); 0: not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class LocalProcess:
    """A process of this node that can be killed even while it hangs, held by a pidfd if the system has them.

    Ray ends an actor by asking it, and takes five seconds to be sure that a stopped one does not answer. A
    process id alone may belong to another process by then.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        """Kills the process; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)

    async def wait(self, timeout_s: float) -> None:
        """Returns when the process has ended, or after ``timeout_s`` seconds.

        Returns at once where the system has no pidfd.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # A pidfd becomes readable when its process has ended.
        loop.add_reader(descriptor, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout_s)
        finally:
            loop.remove_reader(descriptor)


def listen_host(config: Config) -> str:
    """Host on which this node listens for others: loopback unless the configuration says otherwise."""
    return LOOPBACK if config.rpc.listen == "loopback" else str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address; None: not found."""
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
    """Makes collectives use the interface that other nodes reach; call before this process joins a group."""
    if config.rpc.listen == "node":
        # A machine may have interfaces that the other nodes cannot reach.
        interface = interface_of(listen_host(config))
        if interface is not None:
            apply_interface_environment(interface)


def listen_address(config: Config, role: str) -> str:
    """Returns a free address on which a worker of this node can listen for its router.

    Within one machine it is a unix socket: 0.06 ms less per round trip than TCP on loopback, and only this
    user can connect.
    """
    if config.rpc.listen == "loopback":
        directory = socket_directory(Path(tempfile.gettempdir()))
        path = directory / f"{role}-{uuid.uuid4().hex}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            remove_dead_sockets(directory)
            return f"unix:{path}"
    return f"{listen_host(config)}:0"


def socket_directory(parent: Path) -> Path:
    """Returns this user's directory for sockets under ``parent``, which nobody else can enter.

    All processes share one, so that killed processes leave no directories. If another user has made it
    first, a new one with another name is made.
    """
    path = parent / f"specray-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=stat.S_IRWXU)
    if is_private(path):
        return path
    return Path(tempfile.mkdtemp(prefix="specray-", dir=parent))


def remove_dead_sockets(directory: Path) -> None:
    """Removes the sockets that killed processes have left: older than a minute, and nobody listens."""
    for path in directory.glob("*.sock"):
        # Another process of this user may remove it first, or be about to listen on a new one.
        with contextlib.suppress(OSError):
            # Seconds for which a socket may exist before its process listens on it.
            if time.time() - path.stat().st_mtime > 60.0 and not _is_listened_on(path):
                path.unlink(missing_ok=True)


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True
