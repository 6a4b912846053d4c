"""Network namespaces as hosts: one bridge, one cable per host, and no way out.

All names carry this process's id, and everything is removed at the end. The hub, where the bridge lives, has
no address and no route to the machine's own network: traffic cannot leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from specray.errors import ConfigError, EngineLostError

PREFIX = "specray"
START_TIMEOUT_S = 20.0
_NETWORK = "10.234.0"
_CLONE_NEWNET = 0x40000000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    namespace: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace, *arguments)


def obstacles() -> tuple[str, ...]:
    """Lists what this machine lacks for namespaces as hosts; empty: nothing."""
    if not sys.platform.startswith("linux"):
        return (f"Linux (this is {sys.platform})",)
    lacking = [name for name, bit in _CAPABILITIES.items() if not capabilities() >> bit & 1]
    found = [f"root, or {' and '.join(lacking)}"] if lacking else []
    if shutil.which("ip") is None:
        found.append("the command ip (package iproute2)")
    if not found and (reason := _cannot_make_link()):
        found.append(f"a kernel with network namespaces, veth and bridge ({reason})")
    return tuple(found)


def has_netem() -> bool:
    """True if the kernel can delay and lose packets by itself."""
    if shutil.which("tc") is None:
        return False
    with _namespace(f"{PREFIX}-{os.getpid()}-netem{next(_counter)}") as name:
        return _succeeds("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")


def impairment_obstacles() -> tuple[str, ...]:
    """Lists what delay and loss on a cable need beyond namespaces and this machine lacks; empty: nothing."""
    if has_netem() or os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return ()
    return ("the kernel's netem (module sch_netem) or /dev/net/tun",)


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Moves this thread, and those that it starts, into a namespace while the block runs."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter namespace {namespace}: {os.strerror(number)}")

    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            enter(inside)
        finally:
            os.close(inside)
        try:
            yield
        finally:
            enter(before)
    finally:
        os.close(before)


class Network:
    """Hosts behind one bridge; a context manager that removes them with all their processes.

    Args:
        names: names of the hosts, in the order of their addresses.
        impairable: host whose cable can be slow and lossy.
        seed: seed of the losses.

    Raises:
        ConfigError: the machine cannot do it; the message says what is missing.
    """

    def __init__(self, names: Sequence[str], *, impairable: str | None = None, seed: int = 0) -> None:
        self._id = f"{PREFIX}-{os.getpid()}-{next(_counter)}"
        self._hub = f"{self._id}-hub"
        self._seed = seed
        self._impairable = impairable
        self._wire: subprocess.Popen[str] | None = None
        self._has_netem = False
        self._stack = contextlib.ExitStack()
        self.hosts = {
            name: Host(name, f"{self._id}-{name}", f"{_NETWORK}.{index + 1}")
            for index, name in enumerate(names)
        }

    def __enter__(self) -> Self:
        if lacking := obstacles():
            raise ConfigError(f"hosts as network namespaces need {', '.join(lacking)}")
        remove_leftovers()
        self._has_netem = has_netem()
        try:
            self._stack.enter_context(_namespace(self._hub))
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for index, host in enumerate(self.hosts.values()):
                self._stack.enter_context(_namespace(host.namespace))
                self._stack.callback(end_processes, host.namespace)
                self._plug_in(host, f"port{index}")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Pulls a host's cable out of the bridge, or puts it back: nothing passes, nobody is told."""
        port = f"port{list(self.hosts).index(host)}"
        _ip("-n", self._hub, "link", "set", port, "up" if is_up else "down")

    def impair(self, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Makes the impairable host's cable slow (each way) or lossy; without arguments: sound again."""
        assert self._impairable is not None, "a host is impairable"
        if self._wire is not None:
            assert self._wire.stdin is not None and self._wire.stdout is not None
            print(json.dumps({"delay_ms": delay_ms, "loss": loss}), file=self._wire.stdin, flush=True)
            self._wire.stdout.readline()
            return
        host = self.hosts[self._impairable]
        port = f"port{list(self.hosts).index(host.name)}"
        for namespace, device in ((self._hub, port), (host.namespace, "eth0")):
            qdisc = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "netem")
            _run(*qdisc, "delay", f"{delay_ms:g}ms", "loss", f"{100 * loss:g}%")

    def _plug_in(self, host: Host, port: str) -> None:
        if host.name == self._impairable and not self._has_netem:
            self._start_wire(host, port)
        else:
            peer = ("peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        # It leads nowhere; programs that ask which address faces the world get this one.
        _ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")

    def _start_wire(self, host: Host, port: str) -> None:
        if lacking := impairment_obstacles():
            raise ConfigError(f"delay and loss on a host's cable need {', '.join(lacking)}")
        command = (sys.executable, "-m", "specray.bench.testbed.wire", f"--seed={self._seed}")
        wire = subprocess.Popen(
            (*command, f"{host.namespace}/eth0", f"{self._hub}/{port}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._wire = wire
        self._stack.callback(_end, wire)
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise EngineLostError("the process that stands for a cable did not start")


def process_ids(namespace: str) -> tuple[int, ...]:
    """Returns every process in a namespace except this one."""
    listed = _run("ip", "netns", "pids", namespace)
    return tuple(int(word) for word in listed.split() if int(word) != os.getpid())


def end_processes(namespace: str, *, timeout_s: float = 10.0) -> None:
    """Kills every process of a host, as a power failure would; returns when they have ended."""
    end_s = time.monotonic() + timeout_s
    while (pids := process_ids(namespace)) and time.monotonic() < end_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_leftovers() -> None:
    """Removes namespaces of earlier runs that were killed before they could do so."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            end_processes(path.name)
            _succeeds("ip", "netns", "del", path.name)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _succeeds("ip", "netns", "del", name)


def capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _cannot_make_link() -> str | None:
    try:
        with (
            _namespace(f"{PREFIX}-{os.getpid()}-try{next(_counter)}") as name,
        ):
            _ip("-n", name, "link", "add", "bridge", "type", "bridge")
            _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except EngineLostError as error:
        return str(error)
    return None


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _succeeds(*command: str) -> bool:
    try:
        _run(*command)
    except EngineLostError:
        return False
    return True


def _run(*command: str) -> str:
    """Runs a command and returns its output. Raises EngineLostError with its message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineLostError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise EngineLostError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(START_TIMEOUT_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
