"""Kernels of experts on CUDA, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specray.engine.cuda.align import align
from tests.gpu.expert_cases import CASES, Routing, check_alignment, routing


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pair_in_a_tile_of_its_expert(case: Routing) -> None:
    chosen = routing(case)
    check_alignment(align(chosen, case.num_experts, case.tile_rows), chosen, case)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["alignments", "products", "bits"])
def test_triton_kernels_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.experts_interpreted", part],
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
        cwd=Path(__file__).parents[2],
        # Of newer processors, products of numpy add up a row by its place in the tile.
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_CORETYPE": "Nehalem",
        },
    )
    assert run.stdout == "agreed\n", run.stdout + run.stderr
