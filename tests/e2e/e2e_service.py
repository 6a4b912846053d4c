"""The service that end-to-end tests talk to, as they see it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import aiohttp

from specray.config import Config

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """Where the service under test listens."""

    config: Config
    url: str
    grpc_address: str

    @property
    def model(self) -> str:
        return self.config.model_name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def complete(http: aiohttp.ClientSession, service: Service, **fields: Any) -> dict[str, Any]:
    body = {"model": service.model, "max_tokens": 48, "temperature": 0, **fields}
    async with http.post("/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer
