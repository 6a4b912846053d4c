"""Tests of a service that asks for keys: over HTTP and gRPC, on endpoints that listen on loopback only."""

from __future__ import annotations

import os

import aiohttp
import pytest

from specray.errors import UnauthenticatedError
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.types import GenerateParams
from specray.serving.admission.api_keys import new_key
from tests.e2e.listeners import listeners
from tests.e2e.secured.access import KEY
from tests.e2e.service import DEADLINE_S, Service

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("key", [KEY, None, new_key()], ids=["right", "none", "wrong"])
async def test_the_right_key_gets_a_speculated_answer_and_others_nothing(
    service: Service, key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": "def fibonacci(n):\n", "max_tokens": 24, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, headers=headers, timeout=timeout) as http:
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/v1/models") as response:
            assert response.status == (200 if key == KEY else 401)
        async with http.post(
            "/v1/completions", json={**body, "return_speculation_metrics": True}
        ) as response:
            answer = await response.json()
            assert response.status == (200 if key == KEY else 401)
        assert (response.headers.get("WWW-Authenticate") is None) is (key == KEY)
    if key == KEY:
        # The draft's stream has let the Router in.
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


async def test_the_same_keys_hold_over_grpc(service: Service) -> None:
    async with SpecrayClient(service.grpc_address, key=KEY) as client:
        params = GenerateParams(text="def mean(values):\n", max_tokens=8)
        events = [event async for event in client.generate(params, timeout_s=DEADLINE_S)]
        assert events[-1].finish_reason is not None
    async with SpecrayClient(service.grpc_address) as client:
        with pytest.raises(UnauthenticatedError):
            await client.info()


def test_the_endpoints_listen_on_loopback_only(service: Service) -> None:
    ports = {service.config.http.port, service.config.grpc.port}
    # Ray and the engines listen for other nodes.
    own = [entry for entry in listeners(os.getpid()) if entry.port in ports]
    assert {entry.port for entry in own} == ports
    assert [entry for entry in own if not entry.is_local] == []
