"""The service that end-to-end tests talk to, as they see it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from specray.config import Config


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
