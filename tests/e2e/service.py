"""The service that end-to-end tests talk to."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from specray.config import Config

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """Addresses of the service under test."""

    config: Config
    url: str
    grpc_address: str

    @property
    def model(self) -> str:
        return self.config.model_name


def family() -> list[int]:
    """Returns this process and all its descendants."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def processes(name: str) -> list[int]:
    """Returns this service's processes whose title begins with ``name``; Ray titles its workers."""
    found = []
    for process in family():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(name.encode()):
                found.append(process)
    return found


def is_running(process: int) -> bool:
    """True for a process that has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def complete(http: aiohttp.ClientSession, service: Service, **fields: Any) -> dict[str, Any]:
    body = {"model": service.model, "max_tokens": 48, "temperature": 0, **fields}
    async with http.post("/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer
