"""Checks of LiteLLM as a proxy in front of the server."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.clients.checks import (
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    Server,
    Weather,
    check,
    openai_client,
)

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
NAME = "behind-the-proxy"
"""Name of the model as the proxy has it."""


@contextlib.contextmanager
def proxied(server: Server) -> Iterator[Server]:
    """Runs the proxy while the block runs; yields it as a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = {"model": f"openai/{server.model}", "api_base": server.base_url, "api_key": server.key}
    config = {
        "model_list": [{"model_name": NAME, "litellm_params": model}],
        "router_settings": {"num_retries": 0, "allowed_fails": 0, "cooldown_time": 60},
    }
    key = f"sk-{secrets.token_hex(32)}"
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "proxy.yaml"), Path(folder, "proxy.log")
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(path)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield Server(f"http://127.0.0.1:{port}", NAME, key)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
            return
        time.sleep(0.5)
    raise RuntimeError(f"the proxy did not start: {log.read_text(errors='replace')[-2000:]}")


@check("litellm-proxy")
def everything_through_the_proxy(server: Server) -> None:
    import openai

    with proxied(server) as proxy:
        client = openai_client(proxy)
        asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        events = client.chat.completions.create(**asked, stream=True)
        parts = [event.choices[0].delta.content or "" for event in events if event.choices]
        assert "".join(parts) == whole.choices[0].message.content
        parsed = client.chat.completions.parse(
            model=NAME, messages=MESSAGES, max_tokens=MAX_TOKENS, response_format=Weather
        )
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        response = client.responses.create(model=NAME, input=QUESTION, max_output_tokens=16)
        assert response.output_text is not None
        # What is not offered is no fault of the deployment: the proxy goes on using it.
        for wrong in (
            lambda: client.embeddings.create(model=NAME, input="a"),
            lambda: client.chat.completions.create(**{**asked, "temperature": 9}),
        ):
            try:
                wrong()
            except openai.BadRequestError:
                continue
            raise AssertionError("a request that cannot be served was answered")
        again = client.chat.completions.create(**asked)
        assert again.choices[0].message.content == whole.choices[0].message.content
