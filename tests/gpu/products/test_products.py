"""Products with weights in codes on CUDA, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("part", ["values", "products", "rows", "experts", "layers", "wrong"])
def test_kernels_of_codes_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    _agrees("products_interpreted", part)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["products", "cases", "attention", "trees"])
def test_what_is_the_same_in_every_step_in_the_interpreter(part: str) -> None:
    pytest.importorskip("triton", minversion="3.9")
    _agrees("fixed_interpreted", part)


def _agrees(module: str, part: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.products.{module}", part],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["agreed"]
