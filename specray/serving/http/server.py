"""Serves the HTTP application on a port of its own, in the ingress process.

Serve's proxy is a process between client and ingress: measured on 2 cores, a request that is refused at once
costs both of them together 5.8 ms of processor time, and every chunk of a stream passes through both. At ten
times the load that a service can hold, the refusals alone would take all processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from specray.config import HttpConfig
from specray.errors import ConfigError
from specray.serving.http.edge.connections import Connections, protocol_class

KEEP_ALIVE_TIMEOUT_S = 90
START_TIMEOUT_S = 10.0
STOP_GRACE_S = 5.0
PORT_WAIT_S = 10.0
"""Longest wait for the port in seconds: a replica may start a moment before the one it replaces has left."""
_POLL_S = 0.005


class HttpServer:
    """Serves one ASGI application on the event loop that starts it; somebody else runs the lifespan.

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        shares_port: lets several replicas on one machine share the port. The kernel gives a part of the
            connections to every other process that shares it, such as Serve's proxy; so only where it must
            be.
        grace_s: seconds after ``stop`` for calls under way.
        port_wait_s: longest wait for a port that is in use.
        connections: the connections, with their bounds; default: with the default bounds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        shares_port: bool = False,
        grace_s: float = STOP_GRACE_S,
        port_wait_s: float = PORT_WAIT_S,
        connections: Connections | None = None,
    ) -> None:
        self._host, self._port, self._shares_port = host, port, shares_port
        self._port_wait_s = port_wait_s
        if connections is None:
            connections = Connections(HttpConfig().max_connections)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol_class(connections),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",  # Without a line for each malformed request and offered upgrade.
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Connections that wait to be accepted. The loop takes all of them in one turn, at about 40 us
                # each.
                backlog=128,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=math.ceil(grace_s),
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> None:
        """Starts to listen. Raises ConfigError if the address is in use or not of this machine."""
        assert self._task is None, "start() is called once"
        listener = await self._listen()
        self._port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started and not self._task.done():  # noqa: ASYNC110  # It has no event.
                await asyncio.sleep(_POLL_S)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        """Takes no new connections, and gives calls under way ``grace_s`` seconds to end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            self._server.should_exit = True
            await task

    async def _listen(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._port_wait_s
        while True:
            try:
                return self._bind()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or loop.time() >= end:
                    reason = f"cannot listen on {self._host}:{self._port}: {error.strerror}"
                    raise ConfigError(f"http.port: {reason}") from None
            await asyncio.sleep(0.1)

    def _bind(self) -> socket.socket:
        try:
            family, kind, number, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, number)
        except OSError as error:
            raise ConfigError(f"http.host is {self._host!r}: {error.strerror}") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._shares_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener


class _Server(uvicorn.Server):
    """uvicorn.Server that leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
