"""The Triton kernels of sampling draw what a CPU draws: in an interpreter, and on a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.select import check_kernels, choose_kernels
from tests.gpu.sampling_cases import check_cuts, check_noise, check_sampler

CUDA = torch.device("cuda", 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["noise", "start", "cuts", "steps"])
def test_triton_kernels_in_the_interpreter(part: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    # The interpreter of 3.6 does not know numpy 2.4.
    pytest.importorskip("triton", minversion="3.9")
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sampling_interpreted", part],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["agreed"]


def test_torch_kernels_pass_the_same_checks() -> None:
    cpu = torch.device("cpu")
    check_kernels(Kernels(), cpu, vocab_size=203)
    check_noise(Kernels(), cpu, 101)
    check_cuts(Kernels(), cpu, 150, 12)
    check_sampler(Kernels(), cpu, 67, range(4))


@pytest.mark.parametrize("broken", ["draw", "cut", "residual", "words"])
def test_kernels_with_other_numbers_are_not_trusted(broken: str) -> None:
    class Broken(Kernels):
        def words(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
            return super().words(keys, token_ids) ^ int(broken == "words")

        def cut(self, *arguments):  # type: ignore[no-untyped-def]
            cut = super().cut(*arguments)
            return cut._replace(last_tied=cut.last_tied - int(broken == "cut"))

        def draw(self, *arguments, **options):  # type: ignore[no-untyped-def]
            tokens, leads = super().draw(*arguments, **options)
            return tokens + int(broken == "draw"), leads

        def draw_residuals(self, *arguments):  # type: ignore[no-untyped-def]
            return super().draw_residuals(*arguments) + int(broken == "residual")

    with pytest.raises(ArithmeticError, match=f"{broken}: .* numbers are not right"):
        check_kernels(Broken(), torch.device("cpu"), vocab_size=203)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    chosen = choose_kernels(CUDA)
    assert type(chosen).__name__ == "TritonKernels", "see the warning for why not"
    return chosen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestOnThisGpu:
    def test_kernels_pass_their_checks(self, kernels: Kernels) -> None:
        for vocab_size in (203, 151_936):
            check_kernels(kernels, CUDA, vocab_size=vocab_size)

    def test_noise_is_that_of_a_cpu(self, kernels: Kernels) -> None:
        check_noise(kernels, CUDA, 20_001)

    @pytest.mark.parametrize("vocab_size", [2, 150, 5003, 131_072])
    def test_cuts_keep_what_a_sort_keeps(self, kernels: Kernels, vocab_size: int) -> None:
        check_cuts(kernels, CUDA, vocab_size, 40)

    @pytest.mark.parametrize("vocab_size", [1, 67, 5003])
    def test_tokens_are_those_of_a_cpu(self, kernels: Kernels, vocab_size: int) -> None:
        check_sampler(kernels, CUDA, vocab_size, range(30))
