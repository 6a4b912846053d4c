"""A package index on loopback, for pip as it is: counts what it is asked for, and breaks off or waits."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FakeIndex(ThreadingHTTPServer):
    """Serves the wheels of a directory, as PEP 503 says it."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple/"
        self.asked: Counter[str] = Counter()
        """Number of times that each wheel was asked for, by its project."""
        self.cut: set[str] = set()
        """Projects whose wheels end in the middle, each time."""
        self.held: set[str] = set()
        """Projects whose wheels stop in the middle until ``released``."""
        self.released = threading.Event()
        self.dropped: set[str] = set()
        """Projects of held wheels whose reader has gone."""

    def wheel_of(self, project: str) -> Path | None:
        return next(self.directory.glob(f"{project.replace('-', '_')}-1.0-*.whl"), None)

    def handle_error(self, *_: object) -> None:
        """A reader that has gone is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeIndex
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, project = self.path.strip("/").split("/")[:2]
        wheel = self.server.wheel_of(project)
        if wheel is None:
            self.send_error(404)
        elif kind == "simple":
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            self._answer(
                f'<a href="/files/{project}/{wheel.name}#sha256={digest}">{wheel.name}</a>'.encode(),
                "text/html",
            )
        else:
            self.server.asked[project] += 1
            self._answer(wheel.read_bytes(), "application/octet-stream", project)

    def _answer(self, body: bytes, kind: str, project: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        if project in self.server.cut:
            self.close_connection = True
            return
        while project in self.server.held and not self.server.released.wait(0.05):
            self._check_reader(project)
        self.wfile.write(body[half:])

    def _check_reader(self, project: str) -> None:
        """Notes that nobody waits for the rest, and raises BrokenPipeError."""
        self.connection.setblocking(False)
        try:
            has_gone = not self.connection.recv(1)
        except BlockingIOError:
            has_gone = False
        except ConnectionResetError:
            has_gone = True
        finally:
            self.connection.setblocking(True)
        if has_gone:
            self.server.dropped.add(project)
            raise BrokenPipeError

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@contextmanager
def fake_index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """Yields the only index of pip in this process and its children (see tests/conftest.py)."""
    with FakeIndex(directory) as index:
        thread = threading.Thread(target=index.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        monkeypatch.delenv("PIP_NO_INDEX", raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        try:
            yield index
        finally:
            index.released.set()
            index.shutdown()
            thread.join(10)
