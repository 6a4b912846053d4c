"""What processes do that have a home directory, and so compiled kernels, of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


def normed_sum(home: Path) -> float:
    """What a kernel computes that is compiled, or comes from the directory."""
    os.environ["HOME"] = str(home)
    from specray.engine.cpu.norm import FusedRMSNorm
    from specray.engine.cpu.thread_pool import ThreadPool

    rows = torch.arange(200_000, dtype=torch.float32).view(2_000, 100)
    return float(FusedRMSNorm(torch.ones(100), 1e-5, ThreadPool(2))(rows).double().sum())


def normed_sum_of_cached(home: Path) -> float:
    """The same, where the process ends when anything is compiled."""
    import numba.core.ccallback

    def refuse(self: Any) -> None:
        sys.exit("compiled again")

    numba.core.ccallback.CFunc.compile = refuse
    return normed_sum(home)


def pool_size(home: Path) -> int:
    """Threads of a pool, whose kernels come before its threads."""
    os.environ["HOME"] = str(home)
    from specray.engine.cpu.thread_pool import ThreadPool

    return ThreadPool(2).size
