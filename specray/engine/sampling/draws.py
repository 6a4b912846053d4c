"""Tokens drawn with noise: the best of each row (the Gumbel-max trick)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.sampling.noise import NoiseKey, NoiseSource, philox_key

SCORE_SPREAD = 0.5
"""Scores (logits, with noise) that lie half apart differ by a factor of e in the chance that the target draws
their tokens. Measured on the embedded pair at temperatures 0 and 1; 0.4 to 0.7 are nearly as good. The kernel
squares where this divides."""


class Draw(NamedTuple):
    """A row's token, and how far it stands out."""

    token_id: int
    """Index in the row: the token's id, unless the noise is of some ids alone."""
    lead: float = 0.0
    """Log of the token's share of the sum of exp(score / SCORE_SPREAD), where it was asked for."""


def best_tokens(scores: Tensor) -> list[int]:
    """The first best token of each row ``[rows, vocab_size]``."""
    # On CPU numpy finds it ten times as fast.
    best: list[int] = (scores.numpy() if scores.device.type == "cpu" else scores).argmax(-1).tolist()
    return best


def add_noise(logits: Tensor, keys: Sequence[NoiseKey | None], noise: NoiseSource) -> Tensor:
    """Adds to each row its noise, if it has any, in float64, so that ties have no weight.

    Args:
        logits: ``[len(keys), vocab_size]``; left unchanged, and returned where no row has noise.
    """
    rows = [row for row, key in enumerate(keys) if key is not None]
    if not rows:
        return logits
    gumbel = noise.gumbel([key for key in keys if key is not None])
    if len(rows) == len(keys):
        return logits + gumbel
    scores = logits.double()
    scores[rows] += gumbel
    return scores


def draw_tokens(
    logits: Tensor, keys: Sequence[NoiseKey | None], noise: NoiseSource, *, is_judged: bool = False
) -> list[Draw]:
    """The best token of each row with its noise; of float64 scores, so that ties have no weight.

    Args:
        logits: processed, ``[len(keys), vocab_size]``, float32; left unchanged. Of fewer tokens where the
            noise is of these.
        keys: whose noise; None: none.
        is_judged: says how far each stands out.
    """
    rows = [row for row, key in enumerate(keys) if key is not None]
    kernels = compiled_kernels()
    if not rows or kernels is None or logits.dtype != torch.float32:
        return _best(add_noise(logits, keys, noise), is_judged=is_judged)
    wanted = [key for key in keys if key is not None]
    noisy = (logits if len(rows) == len(keys) else logits[rows]).contiguous()
    tokens, leads = kernels.gumbel_argmax(
        noisy, [philox_key(key) for key in wanted], is_judged=is_judged, token_ids=noise.token_ids
    )
    drawn = [Draw(*draw) for draw in zip(tokens, leads, strict=True)]
    if len(rows) == len(keys):
        return drawn
    draws = _best(logits, is_judged=is_judged)
    for row, draw in zip(rows, drawn, strict=True):
        draws[row] = draw
    return draws


def draw_weighted(weights: Tensor, key: NoiseKey, noise: NoiseSource, indices: Tensor | None = None) -> int:
    """The index of a draw from unnormalised weights; a scale does not change a Gumbel argmax.

    Args:
        weights: float64, one for each number of the noise's rows, or for each of ``indices``.
        indices: int64, into a row of the noise; None: all.
    """
    gumbel = noise.gumbel([key])[0]
    return int((weights.log() + (gumbel if indices is None else gumbel[indices])).argmax())


def _best(scores: Tensor, *, is_judged: bool) -> list[Draw]:
    tokens = best_tokens(scores)
    if not is_judged:
        return [Draw(token) for token in tokens]
    kernels = compiled_kernels() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if kernels is not None:
        leads = kernels.leads_of(scores.contiguous(), tokens)
    else:
        spread = scores.float() / SCORE_SPREAD
        leads = (spread.amax(-1) - spread.logsumexp(-1)).tolist()
    return [Draw(*draw) for draw in zip(tokens, leads, strict=True)]


@cache
def compiled_kernels() -> ModuleType | None:
    """None: numba is not installed."""
    try:
        from specray.engine.sampling import gumbel_argmax as draw
    except ImportError:
        return None
    return draw
