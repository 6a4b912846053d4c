"""What the path to a GPU may need: the package, torch, transformers, grpcio and their own requirements.

typer and rich are of these: transformers requires them.
"""

from __future__ import annotations

import os
import subprocess
import sys

FORBIDDEN = (
    "numba",
    "llvmlite",
    "ray",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "aiohttp",
    "accelerate",
    "openai",
    "triton",
)
LOAD = """
import importlib, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
for name in sys.argv[2].split(","):
    importlib.import_module(name)
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""
RUN = """
import logging
logging.basicConfig(format="%(message)s")
from specray.config import EngineConfig
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
config = EngineConfig(device="cpu", dtype="float32", num_threads=1, max_model_len=64, max_num_seqs=2)
runner = build_runner(config, role="draft")
logits = runner.run([SequenceInput([5, 6, 7], 0, [0], 1)]).logits
print(type(runner.forward.attention).__name__, logits.shape[0], bool(logits.isfinite().all()))
"""
MODULES = (
    "specray.engine.build",
    "specray.rpc.workers.worker",
    "specray.cli.app",
    "specray.bench.gpu.run",
    "specray.bench.gpu.stage",
    "specray.bench.gpu.models",
    "specray.bench.gpu.attention",
    "specray.bench.gpu.proposals",
    "specray.bench.gpu.forwards",
    "specray.bench.gpu.pair",
    "specray.bench.gpu.peer",
)


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_command_line_imports_neither_torch_nor_transformers() -> None:
    """A wrong option fails at once."""
    result = _run(LOAD, ",".join(FORBIDDEN), "specray.cli.app,specray.bench.gpu.run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_path_to_a_gpu_needs_nothing_but_torch_transformers_and_grpc() -> None:
    """And a CPU engine says that it has no numba, and runs on torch."""
    result = _run(LOAD + RUN, ",".join(FORBIDDEN), ",".join(MODULES))
    assert result.returncode == 0, result.stderr
    loaded, ran = result.stdout.splitlines()
    assert loaded.split() == ["torch", "transformers"]
    assert ran.split() == ["PlainAttention", "1", "True"]
    assert result.stderr.count("numba cannot be imported") == 1
