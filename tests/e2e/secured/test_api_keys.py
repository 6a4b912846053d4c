"""Tests of a service that asks for keys: over HTTP and gRPC, on endpoints that listen on loopback only."""

from __future__ import annotations

import os

import aiohttp
import pytest

from specray.errors import UnauthenticatedError
from specray.rpc.inference.client import SpecrayClient
from specray.serving.admission.api_keys import new_key
from tests.e2e.calls import DEADLINE_S
from tests.e2e.listeners import listeners
from tests.e2e.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("key", [None, new_key()], ids=["none", "wrong"])
async def test_without_the_right_key_there_is_no_answer(service: Service, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, headers=headers, timeout=timeout) as http:
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/v1/models") as response:
            assert response.status == 401
        async with http.post("/v1/completions", json={"prompt": "def", "max_tokens": 2}) as response:
            assert response.status == 401
        assert "WWW-Authenticate" in response.headers
    async with SpecrayClient(service.grpc_address, key=key) as client:
        with pytest.raises(UnauthenticatedError):
            await client.info()


def test_the_endpoints_listen_on_loopback_only(service: Service) -> None:
    ports = {service.config.http.port, service.config.grpc.port}
    # Ray and the engines listen for other nodes.
    own = [entry for entry in listeners(os.getpid()) if entry.port in ports]
    assert {entry.port for entry in own} == ports
    assert [entry for entry in own if not entry.is_local] == []
