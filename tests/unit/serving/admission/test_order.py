"""The order of every HTTP call: what is refused before which part of its work, and by when."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from specray.config import Config, parse_config
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash
from specray.serving.calls.limits import ServiceLimits
from specray.serving.http.app import build_http_app
from specray.tokenization import Tokenizer
from tests.unit.serving.http.service import (
    INFO,
    MAX_MODEL_LEN,
    MODEL,
    REPLY,
    TOKENIZER,
    Service,
    endless,
    say,
    serving,
    wait_until,
)
from tests.unit.tokenization.tiny_tokenizer import tiny_tokenizer

A, B = "key-a", "key-b"
TEXT = {"prompt": "a", "max_tokens": 4}
LONG = "a" * 5000
"""Text that is tokenized in a thread; the context could not hold it."""
CHAT = tiny_tokenizer(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")


def config_with(keys: dict[str, dict[str, Any]] | None = None, **sections: Any) -> Config:
    entries = [{"name": name, "sha256": key_hash(name), **limits} for name, limits in (keys or {}).items()]
    return parse_config({"served_model_name": MODEL, "auth": {"keys": entries}, **sections})


async def post(
    service: Service, body: object, *, key: str = A, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any]:
    sent = {"Authorization": f"Bearer {key}", **headers}
    async with service.http.post(path, json=body, headers=sent) as response:
        return response.status, await response.json()


@asynccontextmanager
async def dribbling(
    service: Service, num: int, *, key: str = A, length: int = 100, path: str = "/v1/completions"
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Calls of which the heads and one byte of the body have come."""
    connections = []
    try:
        for _ in range(num):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(service.url).port)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{{".encode()
            )
            connections.append((reader, writer))
        yield connections
    finally:
        for _, writer in connections:
            writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


class Counting(Tokenizer):
    """Records the texts that it encodes, and waits where it is told to."""

    seen: list[str]
    go: threading.Event

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.seen.append(text)
        assert self.go.wait(20)
        return super().encode(text, add_special_tokens=add_special_tokens)


def counting(*, is_held: bool = False) -> Counting:
    tokenizer = Counting(CHAT._backend, chat_template="{{ messages[0].content }}")
    tokenizer.seen, tokenizer.go = [], threading.Event()
    if not is_held:
        tokenizer.go.set()
    return tokenizer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_slow_bodies_of_one_key_hold_no_place_of_others(path: str) -> None:
    config = config_with({A: {}, B: {}}, ingress={"max_ongoing_requests": 3})
    async with serving(say(REPLY), config=config) as service, dribbling(service, 9, path=path) as slow:
        # Each further one takes the room of the oldest: three are left.
        assert [await status_of(reader) for reader, _ in slow[:6]] == [429] * 6
        assert (await post(service, TEXT, key=B))[0] == 200
        assert (await post(service, TEXT))[0] == 200


async def test_second_call_of_a_key_is_refused_before_its_body_comes() -> None:
    config = config_with({A: {"max_requests": 1}, B: {}})
    async with serving(say(REPLY), config=config) as service, dribbling(service, 1):
        async with dribbling(service, 2) as others:
            assert [await status_of(reader) for reader, _ in others] == [429, 429]
        assert (await post(service, TEXT, key=B))[0] == 200


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("/v1/chat/completions", (1 << 20) + MAX_MODEL_LEN * 64 + 1, 413),
        ("/v1/messages", (1 << 20) + MAX_MODEL_LEN * 64 + 1, 413),
        ("/v1/responses", (1 << 20) + MAX_MODEL_LEN * 64 + 1, 413),
        ("/v1/completions", (4 << 20) + 1, 413),
        ("/tokenize", (4 << 20) + 1, 413),
    ],
)
async def test_body_whose_length_says_that_it_is_too_long_is_not_waited_for(
    path: str, length: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specray.serving.http.edge.body.DISCARD_TIMEOUT_S", 0.01)
    async with serving(say(REPLY), config=config_with({A: {"max_requests": 1}})) as service:
        assert (await post(service, TEXT))[0] == 200  # The context's length is known from the first call on.
        async with dribbling(service, 1, length=length, path=path) as ((reader, _),):
            assert await status_of(reader) == status
            assert (await post(service, TEXT))[0] == 200, "and holds nothing"


async def test_longest_body_follows_the_context() -> None:
    limits = ServiceLimits(FakeRouterClient(info=INFO), TOKENIZER, config_with())
    assert limits.max_chat_bytes == 4 << 20
    await limits.get()
    assert limits.max_chat_bytes == (1 << 20) + MAX_MODEL_LEN * 64
    small = ServiceLimits(FakeRouterClient(info=INFO), TOKENIZER, config_with(http={"max_body_bytes": 2048}))
    await small.get()
    assert small.max_chat_bytes == 2048


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<s>" * 40}]}, "messages"),
    ],
)
async def test_prompt_that_the_context_cannot_hold_is_not_tokenized(
    path: str, body: dict[str, Any], field: str
) -> None:
    tokenizer = counting()
    async with serving(say(REPLY), tokenizer=tokenizer) as service:
        status, answer = await post(service, body, path=path)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == field
    assert answer["error"]["message"].startswith(f"least number of tokens in {field} is ")
    assert tokenizer.seen == []


async def test_prompt_that_is_truncated_may_be_of_any_length() -> None:
    router = say(REPLY)
    async with serving(router, tokenizer=counting()) as service:
        status, _ = await post(service, {"prompt": LONG, "truncate_prompt_tokens": 3, "max_tokens": 1})
    assert status == 200
    assert router.requests[0].prompt_token_ids == CHAT.encode(LONG)[-3:]


async def test_quota_is_asked_before_a_prompt_is_tokenized_and_settled_after() -> None:
    tokenizer, router = counting(), endless()
    config = config_with({A: {"max_queued_tokens": 20}})
    async with serving(router, config=config, tokenizer=tokenizer) as service:
        first = asyncio.create_task(post(service, {**TEXT, "prompt": "a" * 19}))
        await wait_until(lambda: len(router.requests) == 1)
        num_seen = len(tokenizer.seen)
        # 19 tokens wait. A body of 360 bytes has 45 tokens or more; one of 40 might have five, and has two.
        status, answer = await post(service, {"prompt": "b" * 40, "user": "u" * 300})
        assert (status, answer["error"]["message"]) == (
            429,
            "key 'key-a' has 19 prompt tokens waiting; allowed: 20",
        )
        assert len(tokenizer.seen) == num_seen
        first.cancel()


async def test_one_request_of_a_key_is_in_hand_while_it_is_tokenized() -> None:
    tokenizer = counting(is_held=True)
    config = config_with({A: {"max_requests": 1}, B: {}})
    async with serving(say(REPLY), config=config, tokenizer=tokenizer) as service:
        body = {"prompt": LONG, "truncate_prompt_tokens": 3, "max_tokens": 1}
        first = asyncio.create_task(post(service, body))
        await wait_until(lambda: len(tokenizer.seen) == 1)
        assert [(await post(service, body))[0] for _ in range(3)] == [429] * 3
        assert len(tokenizer.seen) == 1
        tokenizer.go.set()
        assert (await first)[0] == 200


@pytest.mark.parametrize(
    ("path", "by"),
    [
        ("/v1/completions", "body"),
        ("/v1/completions", "header"),
        ("/v1/chat/completions", "body"),
        ("/tokenize", "header"),
    ],
)
async def test_time_of_a_call_is_over_also_while_it_is_tokenized(by: str, path: str) -> None:
    tokenizer, router = counting(is_held=True), say(REPLY)
    async with serving(router, tokenizer=tokenizer) as service:
        text = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": LONG}
        body: dict[str, Any] = {**text}
        if path == "/v1/completions":
            body |= {"truncate_prompt_tokens": 3}
        headers = {"X-Request-Timeout-Seconds": "0.2"} if by == "header" else {}
        if not headers:
            body["timeout_s"] = 0.2
        status, answer = await post(service, body, path=path, **headers)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        tokenizer.go.set()
    assert router.requests == []


async def test_time_of_a_call_is_over_also_while_its_body_comes() -> None:
    async with serving(say(REPLY)) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(service.url).port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"X-Request-Timeout-Seconds: 0.1\r\nContent-Length: 100\r\n\r\n{"
        )
        assert await status_of(reader) == 504
        writer.close()


async def test_router_has_what_is_left_of_the_time_since_the_first_byte() -> None:
    router = say(REPLY)
    app = build_http_app(client=router, tokenizer=TOKENIZER, config=config_with())
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if receive_calls:
            await asyncio.Event().wait()
        receive_calls.append(1)
        return {"type": "http.request", "body": json.dumps({**TEXT, "timeout_s": 9}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    receive_calls: list[int] = []
    now_s = asyncio.get_running_loop().time()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "state": {"specray.first_byte_at": now_s - 4.0},
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 200
    timeout_s = router.requests[0].timeout_s
    assert timeout_s is not None and 4.0 < timeout_s < 5.0


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    tokenizer, router = counting(is_held=True), say(REPLY)
    encode = Tokenizer.encode

    class Mixed(Counting):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            if len(text) < 100:
                return encode(self, text, add_special_tokens=add_special_tokens)
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer.__class__ = Mixed
    async with serving(router, tokenizer=tokenizer) as service:
        body = {"prompt": "a" * 40_000, "truncate_prompt_tokens": 3, "max_tokens": 1}
        tasks = [asyncio.create_task(post(service, body)) for _ in range(6)]
        await wait_until(lambda: len(tokenizer.seen) >= 1)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (await post(service, chat, path="/v1/chat/completions"))[0] == 200
        assert (await post(service, TEXT))[0] == 200
        tokenizer.go.set()
        assert {(await task)[0] for task in tasks} == {200}
