"""What another process does that takes a GPU."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from specray.config import EngineConfig
from specray.engine.runner.gpu_claim import claim_gpu


def hold_gpu(connection: Connection, directory: Path, num_gpus: float | None) -> None:
    """Takes GPU-1 as a draft, says so, and has it until the other end of the connection is closed."""
    options = {} if num_gpus is None else {"num_gpus": num_gpus}
    claim_gpu(EngineConfig(ray_actor_options=options), "draft", "GPU-1", directory=directory)
    connection.send("taken")
    with suppress(EOFError):
        connection.recv()
