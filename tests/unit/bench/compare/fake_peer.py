"""A completions server with the standard library alone, run as a program: a peer for tests of the comparison.

Writes one JSON line per event to ``--log``: its start, every completion's body, its end.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-missing", type=int, default=0, help="tokens that every output lacks")
    parser.add_argument("--status", type=int, default=200, help="of completions")
    arguments = parser.parse_args()

    def write(event: str, body: Any = None) -> None:
        with arguments.log.open("a") as file:
            file.write(json.dumps({"name": arguments.name, "event": event, "body": body}) + "\n")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": arguments.name}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            write("request", body)
            if arguments.status != 200:
                self._answer(arguments.status, b'{"error": {"message": "out of order"}}')
                return
            num_tokens = body["max_tokens"] - arguments.num_missing
            events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(num_tokens)]
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            timings = {"draft_n": 8, "draft_n_accepted": 6}
            events.append({"choices": [], "usage": usage, "timings": timings})
            self._answer(200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            # The header does not announce it, as with llama.cpp's server after a stream.
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    write("start")
    try:
        server.serve_forever()
    finally:
        write("end")


if __name__ == "__main__":
    main()
