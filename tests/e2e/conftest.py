"""One real service for all end-to-end tests: Ray, Serve, HTTP and gRPC, the embedded pair in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_service import Service, free_port

from specray.config import parse_config
from specray.serving.launch import running_service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    config = parse_config(
        {
            # float32: a forward's width does not change the tokens, so outputs can be compared exactly.
            # One thread each: OpenMP threads that share a core with others' spin instead of working.
            "target": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "num_threads": 1},
            "draft": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "num_threads": 1},
            "speculation": {"num_speculative_tokens": 4},
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
            "router": {"round_timeout_s": 2.0, "start_timeout_s": 120},
        }
    )
    with running_service(config):
        yield Service(
            config=config,
            url=f"http://127.0.0.1:{config.http.port}",
            grpc_address=f"127.0.0.1:{config.grpc.port}",
        )
