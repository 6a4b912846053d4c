"""A proxy in front of the server under test that keeps what clients send."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.clients.checks import Server

TIMEOUT_S = 300.0
Change = Callable[[str, bytes], bytes]
_OF_A_CONNECTION = ("connection", "content-length", "host", "transfer-encoding", "accept-encoding")


@dataclass(slots=True)
class Recorder:
    """Requests that went through the proxy, in the order of their answers' heads."""

    server: Server
    """The server as clients reach it: the proxy."""
    client: str = ""
    """Name of the client whose check runs now."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, method: str, path: str, body: bytes, status: int) -> None:
        """Keeps a request once, however often a client sends it."""
        request = {
            "client": self.client,
            "model": self.server.model,
            "method": method,
            "path": path,
            "body": json.loads(body) if body else None,
            "status": status,
        }
        with self.lock:
            if request not in self.requests:
                self.requests.append(request)


@contextlib.contextmanager
def recording(server: Server, change: Change = lambda path, body: body) -> Iterator[Recorder]:
    """Runs a proxy on a free port of loopback while the block runs.

    Args:
        change: from a request's path and body to the body that the server gets.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

        def _forward(self, body: bytes) -> None:
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION
            }
            asked = urllib.request.Request(
                server.url + self.path,
                data=change(self.path, body) if body else None,
                headers=headers,
                method=self.command,
            )
            try:
                answer = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                recorder.keep(self.command, self.path, body, answer.status)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in _OF_A_CONNECTION:
                        self.send_header(name, value)
                # HTTP/1.0: the end of the connection is the end of the answer.
                self.end_headers()
                while part := answer.read1():
                    self.wfile.write(part)
                    self.wfile.flush()

        def log_message(self, format: str, *values: object) -> None:
            """Writes nothing: the checks have their lines."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    url = f"http://127.0.0.1:{proxy.server_address[1]}"
    recorder = Recorder(Server(url, server.model, server.key, server.samples))
    thread = threading.Thread(target=proxy.serve_forever, name="recorder")
    thread.start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
