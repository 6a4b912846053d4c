"""Bounds of a request's head and of what frames its body, and what is no request."""

from __future__ import annotations

import h11
import pytest

from specray.serving.http.edge.heads import BoundedParser

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def events(*parts: bytes) -> list[object]:
    """Feeds a parser, and returns the events up to the end of the request, or until it needs more."""
    parser = BoundedParser()
    found: list[object] = []
    for part in parts:
        parser.receive_data(part)
        while (event := parser.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            found.append(event)
            if isinstance(event, h11.EndOfMessage):
                return found
    return found


def refusal(*parts: bytes) -> tuple[int, str]:
    with pytest.raises(h11.RemoteProtocolError) as caught:
        events(*parts)
    return caught.value.error_status_hint, str(caught.value)


def header_of(num_bytes: int) -> bytes:
    """A header line of this length, without its LF."""
    return b"A: " + (num_bytes - 4) * b"a" + b"\r"


def test_request_line_of_8_kib_is_the_longest() -> None:
    target = b"/" + (8192 - len("GET / HTTP/1.1\r")) * b"a"
    line = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    assert events(line)[0].target == target  # type: ignore[attr-defined]
    assert refusal(line.replace(b"/a", b"/aa")) == (414, "the request line is too long; allowed: 8192 bytes")


def test_request_line_is_refused_before_its_end() -> None:
    assert events(b"GET /" + 8187 * b"a") == []
    assert refusal(b"GET /" + 8187 * b"a", b"a")[0] == 414


def test_header_of_8_kib_is_the_longest() -> None:
    assert len(events(GET + header_of(8192) + b"\n\r\n")) == 2
    expected = (431, "a header is too long; allowed: 8192 bytes")
    assert refusal(GET + header_of(8193) + b"\n\r\n") == expected
    assert refusal(GET + b"A: " + 8190 * b"a") == expected


def test_hundred_headers_are_the_most() -> None:
    assert len(events(GET + 99 * b"a: b\r\n" + b"\r\n")[0].headers) == 100  # type: ignore[attr-defined]
    expected = (431, "there are too many headers; allowed: 100")
    assert refusal(GET + 100 * b"a: b\r\n" + b"\r\n") == expected
    assert refusal(GET + 5000 * b"a:\r\n") == expected


def test_head_of_16_kib_is_the_longest() -> None:
    rest = 16384 - len(GET) - 2 * 8190 - len(b"\n\n\r\n")
    head = GET + header_of(8190) + b"\n" + header_of(8190 + rest) + b"\n\r\n"
    assert len(head) == 16384
    assert len(events(head)) == 2
    expected = (431, "the headers are too long together; allowed: 16384 bytes")
    assert refusal(head.replace(b"Host: x", b"Host: xx")) == expected
    assert refusal(GET + 3 * (header_of(6000) + b"\n")) == expected


def test_body_that_comes_with_its_head_does_not_count_as_head() -> None:
    body = 40_000 * b"\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 40000\r\n\r\n"
    assert sum(len(event.data) for event in events(head + body) if isinstance(event, h11.Data)) == 40_000


def test_head_may_come_byte_by_byte() -> None:
    head = GET + b"A: b\r\n\r\n"
    assert len(events(*(head[n : n + 1] for n in range(len(head))))) == 2


ILL_FORMED = (400, "a line of the head does not end with CR and LF, or goes on in the next")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", (400, "Missing mandatory Host: header")),
        (GET + b"Host: y\r\n\r\n", (400, "Found multiple Host: headers")),
        (GET + b"host: x\r\n\r\n", (400, "Found multiple Host: headers")),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", (400, "Found multiple Host: headers")),
        (GET + b"A: b\r\n c\r\n\r\n", ILL_FORMED),
        (GET + b"A: b\r\n\tc\r\n\r\n", ILL_FORMED),
        (GET + b"A: b\nC: d\r\n\r\n", ILL_FORMED),
        (GET + b"A: b\rC: d\r\n\r\n", ILL_FORMED),
        (b"GET / HTTP/1.1\nHost: x\n\n", ILL_FORMED),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", (405, "CONNECT is not served: this is no proxy")),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", (505, "the HTTP version is not served; allowed: 1.0, 1.1")),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (505, "the HTTP version is not served; allowed: 1.0, 1.1")),
    ],
)
def test_what_is_no_head(head: bytes, expected: tuple[int, str]) -> None:
    assert refusal(head) == expected


@pytest.mark.parametrize(
    "head",
    [
        GET + b"A b\r\n\r\n",
        GET + b"A : b\r\n\r\n",
        GET + b": b\r\n\r\n",
        GET + b"A: b\x00\r\n\r\n",
        b" GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        GET + b"Content-Length: 1, 2\r\n\r\n",
        GET + b"Content-Length: -1\r\n\r\n",
        GET + b"Content-Length: +1\r\n\r\n",
        GET + b"Content-Length: 0x1\r\n\r\n",
        GET + b"Content-Length: " + 30 * b"9" + b"\r\n\r\n",
        GET + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
        GET + b"Content-Length: 1\r\ntransfer-encoding: Chunked\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_malformed_heads_and_doubtful_framing_are_400(head: bytes) -> None:
    assert refusal(head)[0] == 400


@pytest.mark.parametrize(
    "value", [b"gzip", b"chunked, chunked", b"identity, chunked", b"chunked\r\nTransfer-Encoding: chunked"]
)
def test_other_transfer_codings_are_501(value: bytes) -> None:
    assert refusal(GET + b"Transfer-Encoding: " + value + b"\r\n\r\n")[0] == 501


def chunks(*parts: bytes, extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


def test_chunks_of_a_common_size_have_no_bound() -> None:
    found = events(CHUNKED, chunks(*(1000 * [64 * b"a"])))
    assert sum(len(event.data) for event in found if isinstance(event, h11.Data)) == 64_000


FRAMING = (
    400,
    "the chunks of the body are too small, or their extensions or trailers too long; allowed: 2048 bytes "
    "and 1 per 8 of the body",
)


def test_many_tiny_chunks_are_refused() -> None:
    # 5 bytes each frame them: more than 2048 and an eighth from 421 on.
    assert len(events(CHUNKED, chunks(*(420 * [b"a"])))) == 422
    assert refusal(CHUNKED, chunks(*(421 * [b"a"]))) == FRAMING


@pytest.mark.parametrize("extension", [b";" + 100 * b"a", b";a=b" * 30])
def test_long_chunk_extensions_are_refused(extension: bytes) -> None:
    parts = [CHUNKED, *(chunks(b"a", extension=extension)[:-5] for _ in range(100))]
    assert refusal(*parts) == FRAMING


def test_endless_chunk_extension_is_refused() -> None:
    assert refusal(CHUNKED, b"1;", *(8 * [1024 * b"a"])) == FRAMING


def test_endless_trailers_are_refused() -> None:
    assert refusal(CHUNKED, b"0\r\n", *(900 * [b"a: bcdef\r\n"])) == FRAMING


@pytest.mark.parametrize("size", [b"fffffffffffffffffffff", b"-1", b"+1", b"0x1", b"1 1", b"", b"g", b" 1"])
def test_size_of_a_chunk_that_is_none_is_400(size: bytes) -> None:
    assert refusal(CHUNKED + size + b"\r\na\r\n")[0] == 400


def test_trailers_are_no_headers() -> None:
    found = events(CHUNKED, b"1\r\na\r\n0\r\nX-Request-Timeout-Seconds: 1\r\n\r\n")
    assert [name for name, _ in found[0].headers] == [b"host", b"transfer-encoding"]  # type: ignore[attr-defined]
    assert isinstance(found[-1], h11.EndOfMessage)
