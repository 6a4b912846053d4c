"""An HTTP client that costs a load generator as little as possible: POST, status and event times, no JSON.

It shares its cores with the service that it measures, so it only looks for the marks between events. It keeps
times and the beginning of an error, and nothing else of an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from specray.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
MAX_KEPT_CHARS = 200
_ERROR_EVENT: Final = b'data: {"error"'


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One call as its client saw it; times in seconds on the monotonic clock."""

    started_s: float
    ended_s: float
    status: int = 0
    """HTTP status; 0: the call failed before there was one."""
    event_times_s: tuple[float, ...] = ()
    """Arrival of each event of a stream in seconds; those that arrived together have the same time."""
    has_retry_after: bool = False
    error: str = ""
    """Reason why the call failed, or what was wrong with its stream; empty: none."""
    label: str = ""
    """Class of the request, as its sender names it."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


class RawClient:
    """Sends JSON bodies to one path of one server, and reuses connections.

    Args:
        url: URL of the server, ``http`` only.
        path: path of every call.
        headers: additional headers of every call.
        timeout_s: seconds allowed for one call, from its start to its last byte.

    Raises:
        ConfigError: the URL is not an HTTP URL.
    """

    def __init__(self, url: str, path: str, *, headers: dict[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"--url {url}: allowed: http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = ("\r\n".join(lines) + "\r\nContent-Length: ").encode()
        self.idle: deque[_Connection] = deque()

    async def post(self, body: bytes) -> RawAnswer:
        """Makes one call. Never raises for what the server or the network does."""
        started_s = time.monotonic()
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(request, started_s)
        except TimeoutError:
            return _failed(started_s, f"no answer within {self._timeout_s:g} s")
        except OSError as error:
            return _failed(started_s, str(error) or type(error).__name__)

    async def _exchange(self, request: bytes, started_s: float) -> RawAnswer:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                answer = await connection.exchange(request, started_s)
                # A server may close an idle connection just when it is used again.
                if answer is not None:
                    self._keep(connection)
                    return answer
        connection = await self._connect()
        answer = await connection.exchange(request, started_s)
        if answer is None:
            return _failed(started_s, "the server closed the connection without an answer")
        self._keep(connection)
        return answer

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port
            )
        return connection

    def _keep(self, connection: _Connection) -> None:
        if connection.is_open and len(self.idle) < 256:
            self.idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


class _Connection(asyncio.Protocol):
    """A connection; one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self.is_open = True

    async def exchange(self, request: bytes, started_s: float) -> RawAnswer | None:
        """Sends the request and reads the answer; None if the server closed the connection at once."""
        assert self._transport is not None and self._answer is None
        answer = self._answer = _Answer(started_s, asyncio.get_running_loop().create_future)
        try:
            self._transport.write(request)
            await answer.ended
        finally:
            self._answer = None
            if not answer.is_complete:
                self.close()
        return answer.result()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None:
            self._answer.cut()


class _Answer:
    def __init__(self, started_s: float, new_future: Callable[[], asyncio.Future[None]]) -> None:
        self.ended = new_future()
        self.is_complete = False
        """True if the connection may be used again."""
        self._started_s = started_s
        self._ended_s = started_s
        self._head = b""
        self._status = 0
        self._num_missing: int | None = None
        """Missing bytes of a body of known length; None: it comes in chunks."""
        self._tail = b""
        self._event_times_s: list[float] = []
        self._is_done = False
        self._error = ""

    def feed(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._head = head.lower()
            self._status = int(head[9:12])
            _, length, rest = self._head.partition(b"content-length:")
            self._num_missing = int(rest.split(b"\r\n", 1)[0]) if length else None
        if self._status >= 400 and len(self._error) < MAX_KEPT_CHARS:
            self._error += data[:MAX_KEPT_CHARS].decode("utf-8", "replace")
        if self._num_missing is not None:
            self._num_missing -= len(data)
            if self._num_missing <= 0:
                self._finish()
            return
        self._read_events(data)

    def _read_events(self, data: bytes) -> None:
        num_events = data.count(b"data: {")
        if num_events:
            self._event_times_s.extend([time.monotonic()] * num_events)
            if _ERROR_EVENT in data:
                self._error = data[data.index(_ERROR_EVENT) :][:MAX_KEPT_CHARS].decode("utf-8", "replace")
        # The end mark may come in parts.
        self._tail = (self._tail + data)[-64:]
        self._is_done = self._is_done or b"data: [DONE]" in self._tail
        if self._tail.endswith(b"0\r\n\r\n"):
            self._finish()

    def cut(self) -> None:
        if not self.is_complete and self._status:
            self._error = self._error or "the connection ended in the middle of the answer"
        self._end()

    def _finish(self) -> None:
        self.is_complete = b"connection: close" not in self._head
        if self._event_times_s and not self._is_done:
            self._error = self._error or "the stream ended without [DONE]"
        self._end()

    def _end(self) -> None:
        self._ended_s = time.monotonic()
        if not self.ended.done():
            self.ended.set_result(None)

    def result(self) -> RawAnswer | None:
        if not self._status:
            return None
        return RawAnswer(
            started_s=self._started_s,
            ended_s=self._ended_s,
            status=self._status,
            event_times_s=tuple(self._event_times_s),
            has_retry_after=b"\r\nretry-after:" in self._head,
            error=self._error,
        )


def _failed(started_s: float, error: str) -> RawAnswer:
    return RawAnswer(started_s, time.monotonic(), error=error)
