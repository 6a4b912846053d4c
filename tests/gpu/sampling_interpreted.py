"""Runs the Triton kernels of sampling on CPU; started by test_sampling with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import torch

from specray.engine.sampling.device.kernels_triton import TritonKernels
from specray.engine.sampling.device.select import check_kernels
from tests.gpu.sampling_cases import check_cuts, check_noise, check_sampler

CPU = torch.device("cpu")


def noise() -> None:
    check_noise(TritonKernels(1, lanes=16), CPU, 101)


def start() -> None:
    """What an engine does at its start before it trusts the kernels."""
    check_kernels(TritonKernels(4, lanes=16, cut_lanes=128), CPU, vocab_size=131)


def cuts() -> None:
    check_cuts(TritonKernels(1, cut_lanes=64), CPU, 150, 8)


def steps() -> None:
    check_sampler(TritonKernels(1, lanes=32, cut_lanes=128), CPU, 1, range(1, 3))
    # One row in several parts, and several rows in one part of two passes.
    check_sampler(TritonKernels(2, lanes=16, cut_lanes=64), CPU, 67, range(1, 3))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"noise": noise, "start": start, "cuts": cuts, "steps": steps}[sys.argv[1]]()
    print("agreed")
