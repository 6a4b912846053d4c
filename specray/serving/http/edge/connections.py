"""Bounds what connections cost before their requests reach the application: their number, time and bytes.

A connection without a request in progress is *idle*. When there are as many connections as are allowed, or
the process has few descriptors left, the one that has been idle longest is closed for a new one.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from specray.serving.http.edge.heads import BoundedParser
from specray.serving.problems import HttpError, problem_body

HEAD_TIMEOUT_S: Final = 10.0
"""Seconds from a connection, or from the first byte of a later request, to the end of the head."""
UNREAD_TIMEOUT_S: Final = 30.0
"""Seconds for which a full buffer may wait for its client to read. A client that reads at all empties it in a
moment; one that does not would hold a place in the routers, for tokens that nobody sees."""
_FIRST_BYTE: Final = "specray.first_byte_at"


def first_byte_at(scope: Scope) -> float:
    """Returns when the request's first byte arrived, on the running loop's clock.

    Behind Serve's proxy that is unknown: now.
    """
    at: float | None = scope.get("state", {}).get(_FIRST_BYTE)
    return asyncio.get_running_loop().time() if at is None else at


class Connections:
    """The open connections of one server.

    Args:
        max_connections: largest number.
        head_timeout_s: longest time for a head.
    """

    def __init__(self, max_connections: int, *, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        self.head_timeout_s = head_timeout_s
        self.num_accepted = 0
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._leaving: set[Connection] = set()
        """Connections closed for others, whose descriptors the loop frees in its next turn."""
        self._idle: dict[Connection, None] = {}
        """The idle ones, in the order in which they became idle."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection, *, descriptor: int) -> bool:
        """Takes a new connection, and closes an idle one if there must be room. False: there is none."""
        self.num_accepted += 1
        limit = _max_descriptor()
        while len(self._open) >= self._max_connections or descriptor - len(self._leaving) >= limit:
            leaver = next(iter(self._idle), connection)
            self.remove(leaver)
            self._leaving.add(leaver)
            leaver.transport.abort()
            if leaver is connection:
                return False
        self._open.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._leaving.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        self._idle.pop(connection, None)
        if is_idle and connection in self._open:
            self._idle[connection] = None


def _max_descriptor() -> int:
    # The kernel gives out the lowest free number: a high one says how many are in use.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    # Descriptors that are not used for connections: those that the loop accepts in one turn, and some others.
    return limit - min(192, limit // 4)


class Connection(H11Protocol):
    """uvicorn's protocol with bounds. Offered upgrades are not taken, as ``ws="none"`` says."""

    def __init__(self, connections: Connections, **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self.conn: BoundedParser = BoundedParser(defers_bodies=True)
        self.app_state = {}
        self._connections = connections
        self._is_followed_as: str | None = None
        self._is_refused = False
        self._num_rest_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=16 * 1024)
        self.flow = _Flow(transport, self._take_body)
        if self._connections.add(self, descriptor=transport.get_extra_info("socket").fileno()):
            self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_refused or self._has_answered_early:
            self._num_rest_bytes += len(data)
            # Bytes of a body that are still read after the answer to its request.
            if self._num_rest_bytes > 1024 * 1024:
                self.transport.abort()
                return
            self.flow.pause_reading()
            # Seconds between two reads of what nobody waits for: the rest of a body, or what follows a
            # refused head.
            self.loop.call_later(0.01, self._go_on_reading)
        if self._is_refused:
            return
        if self.conn.is_between_requests:
            self._note_first_byte()
        super().data_received(data)
        self._follow()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.holds_body:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        self._num_rest_bytes = 0
        if self.conn.holds_body and self.conn.is_chunked:
            self._end()  # Chunks of a byte take 2,000 times as long to parse as to drop.
            return
        self._note_first_byte()  # Of a request that was sent ahead.
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        self._refuse(error.error_status_hint, str(error))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_answered_early(self) -> bool:
        return not self._is_busy and self.conn.their_state is h11.SEND_BODY

    def _note_first_byte(self) -> None:
        self.app_state[_FIRST_BYTE] = self.loop.time()

    def _follow(self) -> None:
        if self.transport.is_closing() or self._is_refused:
            return
        if self._is_busy:
            state = "busy"
        elif self.cycle is not None and self.conn.is_between_requests:
            state = "kept"  # uvicorn's own timer ends it.
        else:
            state = "reading"
        if state == self._is_followed_as:
            return
        self._is_followed_as = state
        if self._head_timer is not None:
            self._head_timer.cancel()
        if state == "reading":
            self._head_timer = self.loop.call_later(self._connections.head_timeout_s, self._late)
        self._connections.set_idle(self, state != "busy")

    def _take_body(self) -> None:
        """The application asks for the body, or has answered without it."""
        if self.conn.holds_body and not self._is_refused:
            self.conn.holds_body = False
            self.handle_events()

    def _go_on_reading(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _late(self) -> None:
        if self.conn.has_part_of_head:
            self._refuse(408, f"the head did not arrive within {self._connections.head_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        """Answers what is no request, or no longer one, and ends the connection."""
        if self._is_busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self.transport.write(_answer(status, sentence))
        self._end()

    def _end(self) -> None:
        """Ends the connection after its last answer; what still comes is dropped."""
        self._is_refused = True
        # If the rest were not read, the kernel would reset the connection before the client has the answer.
        self.transport.write_eof()
        self.flow.resume_reading()
        if self._head_timer is not None:
            self._head_timer.cancel()
        # Seconds in which the client of a refused head gets to read the answer.
        self._head_timer = self.loop.call_later(2.0, self.transport.abort)
        self._connections.set_idle(self, True)


class _Flow(FlowControl):
    """uvicorn's, which also reports that something is to be read."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed

    def resume_reading(self) -> None:
        super().resume_reading()
        self._resumed()


def _answer(status: int, sentence: str) -> bytes:
    codes = {408: "timeout", 414: "uri_too_long", 431: "headers_too_large"}
    problem = HttpError(status, sentence, code=codes.get(status, "bad_request"))
    body = json.dumps(problem_body(problem)).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Reader(asyncio.BufferedProtocol):
    """Reads little at a time for a connection, through a buffer that all share.

    So others have their turn in between, and what a client sends ahead stays in the kernel.
    """

    def __init__(self, connection: Connection, buffer: memoryview) -> None:
        self._connection = connection
        self._buffer = buffer
        self.connection_made = connection.connection_made  # type: ignore[assignment,method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(self._buffer[:nbytes]))


def protocol_class(connections: Connections) -> type[asyncio.Protocol]:
    """Returns what makes the protocol of each of a server's connections, in uvicorn's terms."""
    buffer = memoryview(bytearray(16 * 1024))

    def protocol(**uvicorn_options: Any) -> _Reader:
        return _Reader(Connection(connections, **uvicorn_options), buffer)

    return cast(type[asyncio.Protocol], protocol)
