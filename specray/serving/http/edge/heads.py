"""Parses HTTP/1.1 requests within bounds: h11's parser, stricter, and with limits on heads and framing.

h11 alone bounds what is incomplete; a head that arrives whole has no limit there, nor has what frames a body.
"""

from __future__ import annotations

import re
from typing import Final

import h11

MAX_LINE_BYTES: Final = 8 * 1024
"""Longest request line and longest header line, as in nginx and Apache."""
MAX_HEAD_BYTES: Final = 16 * 1024
"""Longest head, as in Node."""
MAX_HEADERS: Final = 100
_MAX_FRAMING_BYTES: Final = 2 * 1024
_BYTES_PER_FRAMING_BYTE: Final = 8
"""A body's framing (chunk sizes, their extensions, trailers) may be _MAX_FRAMING_BYTES plus an eighth of the
body."""
_END: Final = re.compile(rb"\n\r?\n")
_ILL_FORMED: Final = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n|\n[ \t]")
"""A CR or LF alone, or a header that goes on in the next line."""
_VERSIONS: Final = (b"1.0", b"1.1")


class BoundedParser(h11.Connection):
    """The server's end of one connection.

    ``next_event`` raises h11.RemoteProtocolError also beyond the limits; its ``error_status_hint`` is the
    status of the answer.

    Args:
        defers_bodies: parse a body only when ``holds_body`` has been set to False.
    """

    def __init__(self, *, defers_bodies: bool = False) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._received = self._body = self._chunks = 0
        """Bytes received since the head's end; of those, the body's; chunks begun."""
        self._defers_bodies = defers_bodies
        self.holds_body = False
        """Whether a body has begun that nobody has asked for yet: it is not parsed."""
        self.is_chunked = False
        """Whether the body of the last request comes in chunks."""

    @property
    def is_between_requests(self) -> bool:
        return self.their_state is h11.IDLE and not self._receive_buffer

    @property
    def has_part_of_head(self) -> bool:
        return self.their_state is h11.IDLE and bool(self._receive_buffer)

    def receive_data(self, data: bytes) -> None:
        self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            _check_head(self.trailing_data[0])
        if self.holds_body:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_request(event)
            self._received, self._body, self._chunks = len(self._receive_buffer), 0, 0
            framing = dict(event.headers)
            self.is_chunked = b"transfer-encoding" in framing
            has_body = self.is_chunked or framing.get(b"content-length", b"0") != b"0"
            self.holds_body = self._defers_bodies and has_body
        elif isinstance(event, h11.Data):
            self._body += len(event.data)
            self._chunks += event.chunk_start
            # Fewest bytes that frame a chunk.
            self._check_framing(5 * self._chunks)
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            self._check_framing(self._received - self._body)
        return event

    def _check_framing(self, num_bytes: int) -> None:
        if num_bytes > _MAX_FRAMING_BYTES + self._body // _BYTES_PER_FRAMING_BYTE:
            raise _refusal(
                400,
                "the chunks of the body are too small, or their extensions or trailers too long; allowed: "
                f"{_MAX_FRAMING_BYTES} bytes and 1 per {_BYTES_PER_FRAMING_BYTE} of the body",
            )


def _check_head(data: bytes) -> None:
    """Checks a head, or what has come of it, before it is parsed. Raises h11.RemoteProtocolError."""
    end = _END.search(data)
    head = data[: end.end()] if end else data
    lines = head.split(b"\n", MAX_HEADERS + 3)
    if len(lines[0]) > MAX_LINE_BYTES:
        raise _refusal(414, f"the request line is too long; allowed: {MAX_LINE_BYTES} bytes")
    if len(lines) > MAX_HEADERS + 3:  # The request line, the blank line, and what follows it: nothing.
        raise _refusal(431, f"there are too many headers; allowed: {MAX_HEADERS}")
    if any(len(line) > MAX_LINE_BYTES for line in lines):
        raise _refusal(431, f"a header is too long; allowed: {MAX_LINE_BYTES} bytes")
    if len(head) > MAX_HEAD_BYTES:
        raise _refusal(431, f"the headers are too long together; allowed: {MAX_HEAD_BYTES} bytes")
    if _ILL_FORMED.search(head):
        raise _refusal(400, "a line of the head does not end with CR and LF, or goes on in the next")


def _check_request(request: h11.Request) -> None:
    if request.method == b"CONNECT":
        raise _refusal(405, "CONNECT is not served: this is no proxy")
    if request.http_version not in _VERSIONS:
        raise _refusal(505, "the HTTP version is not served; allowed: 1.0, 1.1")
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise _refusal(400, "Transfer-Encoding is allowed in HTTP/1.1 without Content-Length only")


def _refusal(status: int, sentence: str) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(sentence, error_status_hint=status)
