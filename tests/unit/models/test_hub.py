"""Models of a hub, which is a server on loopback here."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.models.hub import fetch_from_hub

COMMIT = "a" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights", "run.py": b"evil()"}


class Hub(BaseHTTPRequestHandler):
    """The two calls of the hub that a download makes."""

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        files = {name: body for name, body in FILES.items() if "bare" not in path or name == "config.json"}
        if path.startswith("/api/models/owner/") and "absent" not in path:
            siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
            tree = [{"type": "file", "path": s["rfilename"], "size": s["size"], "oid": "0"} for s in siblings]
            told = tree if "/tree/" in path else {"id": "owner/x", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(told).encode(), has_body=has_body)
        elif "/resolve/" in path and path.rpartition("/")[2] in files:
            self.send(200, files[path.rpartition("/")[2]], has_body=has_body)
        else:
            self.send(404, b"{}", has_body=has_body)

    def send(self, code: int, body: bytes, *, has_body: bool) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_without_its_code(endpoint: str) -> None:
    directory = fetch_from_hub("owner/model", endpoint=endpoint)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }


@pytest.mark.slow
def test_a_model_without_safetensors_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"owner/bare has no config\.json with \*\.safetensors"):
        fetch_from_hub("owner/bare", endpoint=endpoint)


@pytest.mark.slow
def test_a_model_that_the_hub_has_not_is_refused_in_one_sentence(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^the hub gives no owner/absent: ") as refused:
        fetch_from_hub("owner/absent", endpoint=endpoint)
    assert "\n" not in str(refused.value)
