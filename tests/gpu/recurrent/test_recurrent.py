"""Kernels of recurrent layers on CUDA, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = (
    "layers",
    "bits",
    "staying",
    "records",
    "padding",
    "kinds",
    "cuts",
    "convolutions",
    "captured",
    "waits",
    "proofs",
)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_triton_kernels_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.recurrent.recurrent_interpreted", part],
        capture_output=True,
        text=True,
        timeout=400.0,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout == "agreed\n", run.stdout + run.stderr
