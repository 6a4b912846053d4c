"""The service that end-to-end tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.bench.compare.peers.process import free_port
from specray.config import Config, parse_config
from specray.serving.launch import running_service
from tests.e2e.listeners import descendants

# float32: a forward's width does not change the tokens, so outputs can be compared exactly.
# One thread each: OpenMP threads that share a core with others' spin instead of working.
ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "num_threads": 1, "profile_s": 0.5}
"""Settings of both engines."""
RELOAD_S = 150.0
"""Longest time of one `specray reload`, in seconds; a loaded machine imports Ray slowly."""


@dataclass(frozen=True, slots=True)
class Service:
    """Addresses of the service under test."""

    config: Config
    url: str
    grpc_address: str

    @property
    def model(self) -> str:
        return self.config.model_name


@contextlib.contextmanager
def started(**sections: Mapping[str, Any]) -> Iterator[Service]:
    """Starts a service and ends it with the block.

    Args:
        sections: additions to sections of the configuration: target, draft, speculation, router, auth, rpc.
    """
    values: dict[str, Mapping[str, Any]] = {
        "target": ENGINE,
        "draft": ENGINE,
        "speculation": {"num_speculative_tokens": 4, "overlap": "auto"},
        "http": {"port": free_port()},
        "grpc": {"port": free_port()},
        "router": {"round_timeout_s": 2.0, "start_timeout_s": 120},
    }
    values |= {name: {**values.get(name, {}), **added} for name, added in sections.items()}
    config = parse_config(values)
    with running_service(config):
        yield Service(
            config=config,
            url=f"http://127.0.0.1:{config.http.port}",
            grpc_address=f"127.0.0.1:{config.grpc.port}",
        )


async def reload(service: Service, **changed: object) -> tuple[int, str, str]:
    """Runs the command; returns its exit code and what it printed."""
    assignments = [f"--set={key.replace('__', '.')}={json.dumps(value)}" for key, value in changed.items()]
    arguments = ["-m", "specray.cli", "reload", f"--port={service.config.http.port}", *assignments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=-1, stderr=-1, env=environment
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), RELOAD_S)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def processes(name: str) -> list[int]:
    """Returns this service's processes whose title begins with ``name``; Ray titles its workers."""
    found = []
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(name.encode()):
                found.append(process)
    return found
