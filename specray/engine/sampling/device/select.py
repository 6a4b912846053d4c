"""Chooses the kernels of a device; Triton's are tried before they are trusted."""

from __future__ import annotations

import functools
import logging
import math

import numpy as np
import torch
from torch import Tensor

from specray.engine.sampling.device.kernels import Kernels, Residuals, processed
from specray.engine.sampling.device.rows import RowTable, key_words
from specray.engine.sampling.noise import NoiseKey, Purpose

_log = logging.getLogger(__name__)

_VOCAB_SIZE = 5003
_NUM_ROWS = 8


@functools.cache
def choose_kernels(device: torch.device) -> Kernels:
    """Triton's kernels where they work and give the same as torch's operators, else these."""
    if device.type == "cpu":
        return Kernels()
    try:
        from specray.engine.sampling.device.kernels_triton import TritonKernels

        properties = torch.cuda.get_device_properties(device)
        kernels = TritonKernels(properties.multi_processor_count)
        check_kernels(kernels, device)
    # Whatever a compiler or a driver raises: there is another way.
    except Exception as error:
        _log.warning("sampling takes torch's operators, which are slow: %s: %s", type(error).__name__, error)
        return Kernels()
    return kernels


@torch.inference_mode()
def check_kernels(kernels: Kernels, device: torch.device, *, vocab_size: int = _VOCAB_SIZE) -> None:
    """Compares some rows with torch's. Raises ArithmeticError where anything differs."""
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(_NUM_ROWS, vocab_size, generator=generator)).to(device)
    # Ties, and tokens that are impossible.
    logits[1, : vocab_size // 2] = 1.0
    logits[2, vocab_size // 3 :] = -math.inf
    table = _checked_rows(device)
    plain = Kernels()
    for cut, other in ((None, None), (kernels.cut(logits, table), plain.cut(logits, table))):
        # Two cuts may keep the same by different numbers.
        kept = [processed(logits, table, each) for each in (cut, other)]
        _check_equal("cut", kept[0], kept[1])
        for is_judged in (False, True):
            tokens, leads = kernels.draw(logits, table, cut, is_judged=is_judged)
            expected, others = plain.draw(logits, table, cut, is_judged=is_judged)
            _check_equal("draw", tokens, expected)
            _check_equal("lead", leads, others, tolerance=1e-3)
        best, others_best = (each.draw_best(logits, table, 4) for each in (kernels, plain))
        _check_equal("best", best[1], others_best[1])
        _check_equal("score", best[0], others_best[0], tolerance=1e-12)
        sums, others_sums = kernels.sums(logits, table, cut), plain.sums(logits, table, cut)
        _check_equal("largest", sums[0], others_sums[0])
        _check_equal("sum", sums[1] / others_sums[1], torch.ones_like(sums[1]), tolerance=1e-9)
        residuals = _checked_residuals(logits, table)
        _check_equal(
            "residual",
            kernels.draw_residuals(logits, table, cut, sums, residuals),
            plain.draw_residuals(logits, table, cut, others_sums, residuals),
        )
    _check_equal(
        "noise", kernels.gumbel(table.keys, vocab_size), plain.gumbel(table.keys, vocab_size), tolerance=1e-12
    )
    token_ids = torch.arange(7, device=device).expand(_NUM_ROWS, 7) * 11
    _check_equal("words", kernels.words(table.keys, token_ids), plain.words(table.keys, token_ids))


def _checked_rows(device: torch.device) -> RowTable:
    keys: list[NoiseKey | None] = [
        NoiseKey(((1 << 64) - 1) // (row + 1), 1000 * row, Purpose(row % 4)) for row in range(_NUM_ROWS)
    ]
    keys[3] = None
    settings = np.array(
        [
            (1.0, 0, 1.0, -math.inf),
            (1.0, 40, 0.7, -math.inf),
            (0.7, 0, 0.9, -math.inf),
            (1.0, 0, 1.0, -math.inf),
            (1.3, 17, 1.0, -math.inf),
            (0.5, 0, 1.0, math.log(0.05)),
            (1.0, 300, 0.95, math.log(0.01)),
            (2.0, 0, 0.3, -math.inf),
        ]
    )
    divisors, top_k, top_p, log_min_p = (
        torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in settings.T
    )
    return RowTable(
        torch.from_numpy(key_words(keys)).to(device), divisors, top_k.long(), top_p, log_min_p, cuts=True
    )


def _checked_residuals(logits: Tensor, table: RowTable) -> Residuals:
    """Makes the residuals that are tried: one sequence loses nothing, one everything, one a half."""
    probs = (logits / table.divisors.float()[:, None]).double().softmax(-1)
    rows = torch.tensor([0, 4, 5], device=logits.device)
    taken = probs[rows] * torch.tensor([[0.0], [2.0], [1.0]], dtype=torch.float64, device=logits.device)
    taken[2, ::2] = 0.0
    return Residuals(rows, table.keys[rows], taken)


def _check_equal(name: str, output: Tensor, expected: Tensor, *, tolerance: float = 0.0) -> None:
    is_equal = (output == expected) | ((output - expected).abs() <= tolerance)
    if not bool(is_equal.all()):
        raise ArithmeticError(f"{name}: {int((~is_equal).sum())} of {is_equal.numel()} numbers are not right")
