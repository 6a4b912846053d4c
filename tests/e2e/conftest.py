"""Starts a real service for each module of end-to-end tests: Ray, Serve, HTTP, gRPC, and the embedded
pair."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from specray.bench.compare.peers.process import free_port
from specray.config import parse_config
from specray.serving.launch import running_service
from tests.e2e.service import DEADLINE_S, Service


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A module that defines TENSOR_PARALLEL_SIZE gets so many ranks; OVERLAP defaults to auto.

    ROUTER, TARGET and DRAFT are what it adds to these sections of the configuration.
    """
    # float32: a forward's width does not change the tokens, so outputs can be compared exactly.
    # One thread each: OpenMP threads that share a core with others' spin instead of working.
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "num_threads": 1,
        "profile_s": 0.5,
    }
    size = getattr(request.module, "TENSOR_PARALLEL_SIZE", 1)
    config = parse_config(
        {
            "target": {**engine, "tensor_parallel_size": size, **getattr(request.module, "TARGET", {})},
            "draft": {**engine, **getattr(request.module, "DRAFT", {})},
            "speculation": {
                "num_speculative_tokens": 4,
                "overlap": getattr(request.module, "OVERLAP", "auto"),
            },
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
            "router": {
                "round_timeout_s": 2.0,
                "start_timeout_s": 120,
                **getattr(request.module, "ROUTER", {}),
            },
        }
    )
    with running_service(config):
        yield Service(
            config=config,
            url=f"http://127.0.0.1:{config.http.port}",
            grpc_address=f"127.0.0.1:{config.grpc.port}",
        )


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, timeout=timeout) as session:
        yield session
