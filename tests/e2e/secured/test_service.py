"""Tests of the whole path over real Ray, HTTP and gRPC: what users with a key see, also when a draft dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from ray import serve

from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.types import GenerateParams
from tests.e2e.calls import DEADLINE_S, complete, eventually, metric, speculates, streamed
from tests.e2e.secured.access import KEY
from tests.e2e.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n", "import os\nimport sys\n\n"]


@pytest.fixture
async def openai(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key=KEY, timeout=DEADLINE_S, max_retries=0
    ) as client:
        yield client


async def is_idle(http: aiohttp.ClientSession) -> bool:
    names = ("specray_running_sessions", "specray_queue_depth")
    blocks = ("specray_target_blocks_in_use", "specray_draft_blocks_in_use")
    return not any([await metric(http, name) for name in (*names, *blocks)])


async def test_openai_client_completes_and_chats_streaming_and_not(
    service: Service, openai: AsyncOpenAI
) -> None:
    whole = await openai.completions.create(
        model=service.model, prompt=PROMPTS[0], max_tokens=32, temperature=0
    )
    parts = [
        part
        async for part in await openai.completions.create(
            model=service.model, prompt=PROMPTS[0], max_tokens=32, temperature=0, stream=True
        )
    ]
    assert whole.usage is not None and whole.usage.completion_tokens == 32
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text != ""

    messages: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
    chat = await openai.chat.completions.create(
        model=service.model, messages=messages, max_completion_tokens=24, temperature=0
    )
    deltas = [
        part.choices[0].delta.content or ""
        async for part in await openai.chat.completions.create(
            model=service.model, messages=messages, max_completion_tokens=24, temperature=0, stream=True
        )
        if part.choices
    ]
    assert "".join(deltas) == chat.choices[0].message.content != ""
    assert [model.id async for model in openai.models.list()] == [service.model]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 0.7, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ],
    ids=["greedy", "coupled", "coupled with processors"],
)
async def test_output_is_the_same_with_speculation_on_and_off(
    service: Service, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    for prompt in PROMPTS:
        plain = await complete(http, prompt=prompt, speculation={"enabled": False}, **fields)
        speculated = await complete(http, prompt=prompt, return_speculation_metrics=True, **fields)
        assert speculated["choices"] == plain["choices"]
        assert speculated["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_concurrent_mixed_requests_answer_as_if_alone(
    service: Service, http: aiohttp.ClientSession, openai: AsyncOpenAI
) -> None:
    variants: list[dict[str, Any]] = [
        {"prompt": PROMPTS[i % len(PROMPTS)], "seed": i, "temperature": i % 2, "max_tokens": 16 + 8 * i}
        for i in range(8)
    ]
    alone = [(await complete(http, **fields))["choices"][0]["text"] for fields in variants]

    async def streamed(fields: dict[str, Any]) -> str:
        stream = await openai.completions.create(model=service.model, stream=True, **fields)
        return "".join([part.choices[0].text async for part in stream])

    async def whole(fields: dict[str, Any]) -> str:
        text: str = (await complete(http, **fields))["choices"][0]["text"]
        return text

    async def over_grpc(fields: dict[str, Any]) -> str:
        params = GenerateParams(
            text=fields["prompt"],
            seed=fields["seed"],
            temperature=float(fields["temperature"]),
            max_tokens=fields["max_tokens"],
        )
        async with SpecrayClient(service.grpc_address, key=KEY) as client:
            return "".join([event.text async for event in client.generate(params, timeout_s=DEADLINE_S)])

    ways = (streamed, whole, over_grpc)
    together = await asyncio.gather(*(ways[i % 3](fields) for i, fields in enumerate(variants)))
    assert together == alone
    await eventually(lambda: is_idle(http), "every block is free")


async def test_grpc_info_and_generate(service: Service, http: aiohttp.ClientSession) -> None:
    async with SpecrayClient(service.grpc_address, key=KEY) as client:
        info = await client.info()
        events = [
            event
            async for event in client.generate(
                GenerateParams(text=PROMPTS[0], max_tokens=20, temperature=0.0), timeout_s=DEADLINE_S
            )
        ]
    assert (info.model, info.vocab_size, info.max_model_len) == (service.model, 4096, 512)
    expected = await complete(http, prompt=PROMPTS[0], max_tokens=20)
    assert "".join(event.text for event in events) == expected["choices"][0]["text"]
    assert events[-1].usage is not None and events[-1].usage.num_output_tokens == 20


async def test_abandoned_requests_free_both_engines(service: Service, http: aiohttp.ClientSession) -> None:
    body = {
        "model": service.model, "prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    async with http.post("/v1/completions", json={**body, "stream": True}) as response:
        assert (await response.content.readline()).startswith(b"data: ")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await http.post("/v1/completions", json={**body, "max_tokens": 480, "n": 4})
    await eventually(lambda: is_idle(http), "abandoned requests are released")


async def test_killed_draft_costs_only_speed(service: Service, http: aiohttp.ClientSession) -> None:
    fields = {"prompt": PROMPTS[1], "max_tokens": 160, "temperature": 1, "seed": 3, "ignore_eos": True}
    undisturbed = await complete(http, speculation={"enabled": False}, **fields)

    handle: Any = serve.get_deployment_handle("Draft", "specray")
    killed = await handle.lease.remote()
    lost = await metric(http, "specray_draft_lost_total")
    text, error = await streamed(http, lambda: os.kill(killed.pid, signal.SIGKILL), **fields)
    assert (text, error) == (undisturbed["choices"][0]["text"], None)

    async def is_noticed() -> bool:
        return await metric(http, "specray_draft_lost_total") > lost

    await eventually(is_noticed, "the loss is noticed")
    await eventually(lambda: speculates(http), "a new draft is leased")
    assert (await handle.lease.remote()).pid != killed.pid


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b'{"model": ', "application/json", 400),
        (b'{"model": "MODEL", "prompt": "\xff\xfe"}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": ""}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": "x", "temperature": -1}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": "x", "top_p": NaN}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": [5000000]}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": "x", "max_tokens": -1}', "application/json", 400),
        (b'{"model": "MODEL", "prompt": "x", "n": 1000}', "application/json", 400),
        (b'{"model": "other", "prompt": "x"}', "application/json", 404),
        (b"model=MODEL", "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', "application/json", 413),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, bytes) else None,
)
async def test_bad_input_is_refused_by_name_and_hurts_nobody(
    service: Service, http: aiohttp.ClientSession, content: bytes, content_type: str, status: int
) -> None:
    data = content.replace(b"MODEL", service.model.encode())
    async with http.post("/v1/completions", data=data, headers={"Content-Type": content_type}) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
    answer = await complete(http, prompt=PROMPTS[0], max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_ready_runs_a_step_and_health_answers(service: Service, http: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ready"):
        async with http.get(path) as response:
            assert response.status == 200, path
    async with aio.insecure_channel(service.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        # At first nobody has asked yet.
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
