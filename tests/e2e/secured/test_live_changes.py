"""Changes of a service that goes on serving: `specray reload` as users call it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specray.serving.admission.api_keys import key_hash, new_key
from tests.e2e.calls import PROMPT, eventually
from tests.e2e.secured.access import HEADERS, KEY
from tests.e2e.service import RELOAD_S, Service, processes, reload
from tests.processes import is_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

MAX_TOKENS = 220
STREAM_LENS = (MAX_TOKENS, 151, 103, 67)
"""Output tokens of the streams that go on: of different lengths, so that they do not all end in one step."""
NEW_KEY = new_key()
NEW_HEADERS = {"Authorization": f"Bearer {NEW_KEY}"}


def entry(key: str, **values: object) -> dict[str, object]:
    return {"name": "team-a", "sha256": key_hash(key), "can_observe": True, **values}


@asynccontextmanager
async def session(service: Service, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=RELOAD_S)
    async with aiohttp.ClientSession(service.url, headers=headers, timeout=timeout) as http:
        yield http


async def ask(http: aiohttp.ClientSession, **fields: Any) -> tuple[int, Any]:
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, **fields}
    async with http.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


async def drafts_per_step(http: aiohttp.ClientSession) -> float:
    status, answer = await ask(http, return_speculation_metrics=True)
    assert status == 200, answer
    told = answer["metrics"]["speculative_decoding"]
    return float(told["num_draft_tokens"] / told["num_spec_steps"])


async def streamed(http: aiohttp.ClientSession, max_tokens: int = MAX_TOKENS) -> str | None:
    """The text of a stream; None where the key is refused."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with http.post("/v1/completions", json=body) as response:
        if response.status == 401:
            return None
        assert response.status == 200
        parts = (await response.read()).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    events = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    assert not [event for event in events if "error" in event]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def stream_on(http: aiohttp.ClientSession, max_tokens: int, ended: list[tuple[float, str]]) -> float:
    """Streams again and again until the key is refused; returns when that was."""
    while (text := await streamed(http, max_tokens)) is not None:
        ended.append((time.monotonic(), text))
    return time.monotonic()


async def hang_ingress(service: Service) -> None:
    """Stops the Ingress; returns when another asks for the new key, and that one has ended."""
    (hung,) = processes("ray::ServeReplica:specray:Ingress")
    os.kill(hung, signal.SIGSTOP)
    async with session(service, HEADERS) as http:

        async def is_refused_by_another() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(1.0):
                    return (await ask(http))[0] == 401
            return False

        await eventually(is_refused_by_another, "another Ingress is there")
    assert not is_running(hung)


def debug_lines() -> int:
    """Number of lines that only an Ingress at level DEBUG writes."""
    logs = Path(tempfile.gettempdir()).glob(f"ray/session_*_{os.getpid()}/logs/**/*")
    texts = (path.read_text(errors="replace") for path in logs if path.is_file())
    return sum(text.count("DEBUG specray.serving.observe: GET /health 200") for text in texts)


async def test_streams_go_on_while_speculation_limits_keys_and_logs_change(service: Service) -> None:
    targets = processes("ray::TargetRank")
    assert len(targets) == 1
    async with session(service, HEADERS) as http:
        undisturbed = await streamed(http)
        assert undisturbed
        assert await drafts_per_step(http) > 2
        async with http.get("/health") as response:
            assert response.status == 200
        assert debug_lines() == 0

        code, output, errors = await reload(
            service, router__max_queued_requests=7, target__max_num_seqs=9, draft__dtype="bfloat16"
        )
        assert (code, output) == (2, "")
        (line,) = [line for line in errors.splitlines() if line.startswith("specray: ")]
        assert "target.max_num_seqs: 16 -> 9 (the target is loaded and placed by it)" in line
        assert 'draft.dtype: "float32" -> "bfloat16"' in line

        ended: list[tuple[float, str]] = []
        streams = [asyncio.create_task(stream_on(http, size, ended)) for size in STREAM_LENS]
        try:
            code, output, errors = await reload(
                service,
                speculation__num_speculative_tokens=2,
                speculation__overlap="serial",
                router__max_queued_requests=9,
                http__max_body_bytes=2048,
                auth__keys=[entry(NEW_KEY, max_requests=3)],
                logging__level="DEBUG",
            )
            assert code == 0, errors
            refused_s = min(await asyncio.wait_for(asyncio.gather(*streams), RELOAD_S))
        finally:
            for stream in streams:
                stream.cancel()
    try:
        # The refused command has changed nothing: 256 was still there.
        assert output.splitlines() == [
            "speculation.num_speculative_tokens: 4 -> 2",
            'speculation.overlap: "auto" -> "serial"',
            "router.max_queued_requests: 256 -> 9",
            f"auth.keys: team-a ({key_hash(KEY)[:8]}) -> team-a ({key_hash(NEW_KEY)[:8]})",
            "http.max_body_bytes: 4194304 -> 2048",
            'logging.level: null -> "DEBUG"',
        ]
        assert all(text and undisturbed.startswith(text) for _, text in ended)
        assert undisturbed in {text for _, text in ended}
        # Some had begun under the old values, and ended after those had gone.
        assert any(time_s > refused_s for time_s, _ in ended)
        assert processes("ray::TargetRank") == targets

        async with session(service, NEW_HEADERS) as http:
            assert await streamed(http) == undisturbed
            assert 0 < await drafts_per_step(http) <= 2
            status, answer = await ask(http, prompt="a" * 3000)
            assert (status, answer["error"]["code"]) == (413, "request_too_large")
            status, answer = await ask(http, n=4)
            assert (status, answer["error"]["param"]) == (400, "n")
            async with http.get("/health") as response:
                assert response.status == 200
        # The line is written when its answer has been sent.
        await eventually(debug_lines, "a line of level DEBUG")
        async with session(service, HEADERS) as http:
            assert (await ask(http))[0] == 401
        await hang_ingress(service)
        async with session(service, NEW_HEADERS) as http:
            assert await streamed(http) == undisturbed
    finally:
        code, _, errors = await reload(
            service,
            speculation__num_speculative_tokens=4,
            speculation__overlap="auto",
            http__max_body_bytes=4194304,
            auth__keys=[entry(KEY)],
            logging__level=None,
        )
        assert code == 0, errors
