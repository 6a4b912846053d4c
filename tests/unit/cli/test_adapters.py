"""``specray adapters``: what is sent and shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from specray.cli.adapters import app

LISTED = [
    {"id": "big", "root": "big", "parent": None, "adapter": None},
    {"id": "alias", "root": "big", "parent": "big", "adapter": None},
    {"id": "big:sql", "root": "sql-2", "parent": "big", "adapter": "abcd"},
]


class Handler(BaseHTTPRequestHandler):
    """Lists LISTED, and answers each POST with its body and a digest."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": LISTED})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((self.path, body))  # type: ignore[attr-defined]
        self._answer({**body, "digest": "abcd"})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, values: Any) -> None:
        data = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.bodies = []  # type: ignore[attr-defined]
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(server: Any, *args: str) -> str:
    result = CliRunner().invoke(app, [*args, "--url", f"http://127.0.0.1:{server.server_port}"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_of_what_is_served_adapters_alone_are_listed(server: Any) -> None:
    assert run(server, "list") == "big:sql\tsql-2\tabcd\n"


def test_loads_name_a_folder_and_a_model_where_they_are_given(server: Any) -> None:
    assert run(server, "load", "sql") == "sql\tsql\tabcd\n"
    run(server, "load", "sql", "sql-2", "--replace", "--model", "big")
    run(server, "load", "sql", "")
    run(server, "unload", "sql", "--model", "big")
    path, plain = "/v1/load_lora_adapter", {"lora_name": "sql", "load_inplace": False, "model": None}
    assert server.bodies == [
        (path, {**plain, "lora_path": "sql"}),
        (path, {**plain, "lora_path": "sql-2", "load_inplace": True, "model": "big"}),
        (path, {**plain, "lora_path": ""}),
        ("/v1/unload_lora_adapter", {"lora_name": "sql", "model": "big"}),
    ]
