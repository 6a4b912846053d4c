"""Runs the Triton kernels of attention on CPU; started by test_blocks with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import torch

from specray.engine.attention import store_triton
from specray.engine.attention import triton as triton_attention
from specray.engine.attention.latent_triton import LatentAttend
from specray.engine.attention.paged import store_rows
from specray.engine.attention.select import Backend, Model, check_backend
from specray.engine.attention.triton import TritonAttend
from specray.engine.model import operators_triton as operators_triton
from specray.engine.step import HeadShape
from tests.gpu.attention_checks import check_case, check_store, check_tree
from tests.gpu.block_cases import CASES, EDGES, LATENT_CASES, SOME_TREES

CPU = torch.device("cpu")


def cases() -> None:
    for case in CASES:
        for num_processors in (1, 64):
            check_case(TritonAttend(num_processors), case, CPU, torch.float32, 1e-5)
        check_store(case, CPU)
    for case in LATENT_CASES:
        check_case(LatentAttend(case.shape.latent_dim, 32), case, CPU, torch.float32, 1e-5)


def edges(programs_per_processor: int) -> None:
    for case in EDGES:
        check_case(TritonAttend(1, programs_per_processor), case, CPU, torch.float32, 1e-5)


def trees() -> None:
    for tree in SOME_TREES:
        check_tree(TritonAttend(64), tree, CPU)


def start() -> None:
    """What an engine does at its start before it trusts the kernels."""
    # The interpreter cannot compute with bfloat16.
    for dtype in (torch.float32, torch.float16):
        operators_triton.check_gate(CPU, dtype)
        model = Model(HeadShape(6, 2, 32), dtype, CPU, has_sinks=dtype == torch.float32)
        check_backend(Backend("triton", TritonAttend(64), store_triton.store_rows, 16), model)
        model = Model(HeadShape(6, 1, 24, None, 16), dtype, CPU)
        check_backend(Backend("triton", LatentAttend(16, 32), store_rows, 16), model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # So few places are split as in long sequences.
    triton_attention.MIN_SPLIT_PLACES = 32
    {
        "cases": cases,
        "whole-edges": lambda: edges(0),
        "split-edges": lambda: edges(1000),
        "trees": trees,
        "start": start,
    }[sys.argv[1]]()
    print("agreed")
