"""Products with weights in codes on CUDA, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("part", ["values", "products", "rows", "layers", "wrong"])
def test_kernels_of_codes_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    _agrees("products_interpreted", part)


@pytest.mark.parametrize(
    "format", ["q4_k", "mxfp4", "int4", "fp8", "nvfp4", "int8 anew", "int4 anew", "others"]
)
def test_experts_in_codes_as_one_in_the_interpreter(format: str) -> None:
    pytest.importorskip("triton", minversion="3.9")
    _agrees("experts_interpreted", format)


@pytest.mark.parametrize("part", ["products", "cases", "attention", "trees", "mixtures"])
def test_what_is_the_same_in_every_step_in_the_interpreter(part: str) -> None:
    pytest.importorskip("triton", minversion="3.9")
    _agrees("fixed_interpreted", part)


@pytest.mark.parametrize("part", ["products", "prompts", "gates"])
def test_kernels_of_adapters_in_the_interpreter(part: str) -> None:
    pytest.importorskip("triton", minversion="3.9")
    _agrees("adapters_interpreted", part)


def _agrees(module: str, part: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.products.{module}", part],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
        # Of newer processors, products of numpy add up a row by its place in the tile.
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_CORETYPE": "Nehalem",
        },
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["agreed"]
