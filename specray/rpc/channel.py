"""Addresses, channels and ports of gRPC connections, and the options of both ends."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from grpc import aio

from specray.config import RpcConfig
from specray.errors import ConfigError
from specray.rpc.security import PeerSecurity, client_credentials, server_credentials

MAX_SOCKET_PATH_BYTES = 107
"""Maximum bytes of a socket path: ``sockaddr_un.sun_path`` on Linux without its final zero."""

IDLE_TIMEOUT_S = 90.0
"""Seconds that a connection may have no calls; clients connect again by themselves."""
MAX_STREAMS = 100
"""Calls of one connection of the public service at a time; a client's further ones wait in the client. gRPC
holds at most 1000 that have not begun, whoever sends them, and cancels what comes beyond."""

GrpcOptions = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Options of a connection, used by the client and the server end alike.

    Both ends ping: within ``keepalive_time_s + keepalive_timeout_s`` a router notices a lost worker, and a
    worker frees the sequences of a lost router, even if no packet says so.
    """

    max_receive_bytes: int = 64 * 1024 * 1024
    max_send_bytes: int = 64 * 1024 * 1024
    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 5.0
    reuse_port: bool = False
    """True if several processes may listen on one port; the kernel then spreads connections over them."""
    max_connections: int | None = None
    """Open connections of a service that anybody may reach, which also ends idle ones; None: any number."""
    security: PeerSecurity = field(default_factory=PeerSecurity)
    """TLS and secret of the engines' streams; the public service has keys instead."""

    def __post_init__(self) -> None:
        for name in ("max_receive_bytes", "max_send_bytes"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1..{2**31 - 1}")
        for name in ("keepalive_time_s", "keepalive_timeout_s"):
            if not 0.001 <= getattr(self, name) <= 86_400:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 0.001..86400")

    def for_client(self) -> GrpcOptions:
        """Options of a channel: a connection of its own, directly to the peer."""
        tls = self.security.tls
        name = (
            ()
            if tls is None or tls.server_name is None
            else (("grpc.ssl_target_name_override", tls.server_name),)
        )
        return (
            *self._common(),
            *name,
            ("grpc.use_local_subchannel_pool", 1),
            # Peers are inside the cluster: do not use a proxy from the environment.
            ("grpc.enable_http_proxy", 0),
        )

    def for_server(self) -> GrpcOptions:
        """Options of a server that accepts the client's pings (else GOAWAY "too_many_pings")."""
        return (
            *self._common(),
            # Pings pile up when a peer's machine stalls: it is slow, not hostile.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", int(self.reuse_port)),
            *self._bounds(),
        )

    def _bounds(self) -> GrpcOptions:
        if self.max_connections is None:
            return ()
        return (
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            # From a connection to its first frame.
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", int(IDLE_TIMEOUT_S * 1000)),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
        )

    def _common(self) -> GrpcOptions:
        return (
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            ("grpc.max_send_message_length", self.max_send_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1000)),
            # Without it an unanswered ping ends the connection after a minute, despite the time-out above.
            ("grpc.http2.ping_timeout_ms", int(self.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # Messages are a few hundred bytes: probing the bandwidth would only add pings.
            ("grpc.http2.bdp_probe", 0),
        )


def channel_options(rpc: RpcConfig) -> ChannelOptions:
    return ChannelOptions(security=PeerSecurity(tls=rpc.tls, secret_file=rpc.secret_file))


@dataclass(frozen=True, slots=True)
class Address:
    """``unix:/path`` or ``host:port``; exactly one of ``path`` and ``host`` is set."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.is_unix or self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def target(self) -> str:
        """Address as text, in the form that gRPC and users write."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses ``unix:/absolute/path``, ``host:port`` or ``[ipv6]:port``.

    Raises:
        ConfigError: the address has none of these forms.
    """
    if text.startswith("unix:"):
        return _parse_unix(text)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(
            f"address is {text!r}; allowed: unix:/absolute/path or host:port with port 0..65535"
        )
    return Address(host=match[1] or match[2], port=int(match[3]))


def parse_peer(address: str) -> Address:
    """Parses an address to connect to. Raises ConfigError."""
    parsed = parse_address(address)
    if not parsed.is_unix and parsed.port == 0:
        raise ConfigError(f"address is {address!r}; a port to connect to is 1..65535")
    return parsed


def _parse_unix(text: str) -> Address:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise ConfigError(f"address is {text!r}; a socket path must be absolute: unix:/path")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"address is {text!r}; a socket path has at most {MAX_SOCKET_PATH_BYTES} bytes, "
            f"this one has {len(os.fsencode(path))}"
        )
    return Address(path=path)


def check_can_listen(address: Address, *, reuse_port: bool = False) -> None:
    """Checks the address before anything slow is loaded; removes the socket file of a dead process.

    Args:
        reuse_port: the server's option.

    Raises:
        ConfigError: the address is in use, not writable, or not of this machine.
    """
    try:
        if address.is_unix:
            _check_unix(Path(address.path))
        else:
            _check_tcp(address, reuse_port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {address.target}: {reason}") from None


def _check_unix(path: Path) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{directory} is no directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{directory} is not writable")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(errno.EEXIST, "the path exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _check_tcp(address: Address, reuse_port: bool) -> None:
    candidates = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, target = candidates[0]
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC does: connections of an earlier server in TIME_WAIT do not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(target)
        # With SO_REUSEADDR, only a listening socket is in the way.
        probe.listen(1)


def open_channel(address: Address, options: ChannelOptions) -> aio.Channel:
    """Opens a channel to a peer, with TLS if the options say so and the address is not a unix socket.

    Raises:
        ConfigError: a certificate is missing or invalid.
    """
    tls, plain = options.security.tls, grpc.Compression.NoCompression
    if tls is None or address.is_unix:
        return aio.insecure_channel(address.target, options=options.for_client(), compression=plain)
    return aio.secure_channel(
        address.target, client_credentials(tls), options=options.for_client(), compression=plain
    )


def bind(server: aio.Server, address: Address, options: ChannelOptions) -> Address:
    """Makes a server listen before its start; returns the address with the real port.

    A unix socket is for this user alone; TCP has TLS if the options say so.

    Raises:
        ConfigError: the address is in use, not writable or not of this machine; or a certificate is invalid.
    """
    check_can_listen(address, reuse_port=options.reuse_port)
    tls = None if address.is_unix else options.security.tls
    try:
        if tls is None:
            port = server.add_insecure_port(address.target)
        else:
            port = server.add_secure_port(address.target, server_credentials(tls))
    except RuntimeError:
        # gRPC logs the reason, but reports only the failure.
        raise ConfigError(f"cannot listen on {address.target}") from None
    if address.is_unix:
        Path(address.path).chmod(stat.S_IRUSR | stat.S_IWUSR)
        return address
    return replace(address, port=port)
