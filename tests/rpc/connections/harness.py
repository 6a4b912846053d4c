"""Routers over gRPC with engines that have no tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specray.config import SpeculationConfig
from specray.fakes import FakeTarget
from specray.interfaces import Drafter
from specray.requests import GenerateRequest
from specray.router import Router
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.rpc.workers.server import engine_server
from specray.types import SamplingParams

DEADLINE_S = 30.0
NUM_TOKENS = 120


class Leases:
    """Drafts at fixed addresses, one after the other."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses
        self.num_leased = 0

    async def lease(self) -> Drafter:
        address = self._addresses[min(self.num_leased, len(self._addresses) - 1)]
        drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S)
        self.num_leased += 1
        return drafter


@asynccontextmanager
async def router(
    target: FakeTarget, address: str, leases: Leases | None, **speculation: Any
) -> AsyncIterator[Router]:
    """A router, and over gRPC its target."""
    server = engine_server(lambda: target, role="target", address=address)
    await server.start()
    verifier = await GrpcVerifier.connect(address, timeout_s=DEADLINE_S)
    values = {"num_speculative_tokens": 3, "fallback": "none", **speculation}
    made = Router(verifier, leases, speculation=SpeculationConfig.model_validate(values))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        await server.stop(0.5)


def request(number: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=3)
    return GenerateRequest(f"r{number}", (1, 2, 3 + number), sampling, NUM_TOKENS)
