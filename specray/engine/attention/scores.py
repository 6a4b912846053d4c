"""Attention whose scores are capped or share their weight with sinks, for models that want one or both."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What becomes of scores before they are weights."""

    softcap: float | None = None
    """Limit that scores approach as a hyperbolic tangent does; None: there is none."""
    sinks: torch.Tensor | None = None
    """Score of each query head's sink, ``[num_heads]``: it takes weight, gives no value; None: no sinks."""


def attend_by_rule(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attends in float32.

    Args:
        query: ``[num_kv_heads, 1, num_rows * group_size, key_dim]``, the heads of a row side by side.
        keys, values: ``[num_kv_heads, 1, num_keys, size]``.
        mask: additive, ``[num_rows * group_size, num_keys]``; None: everything is visible.

    Returns:
        ``[num_kv_heads, 1, num_rows * group_size, value_dim]``, in the query's data type.
    """
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)) * scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    num_keys = scores.shape[3]
    if rule.sinks is not None:
        num_kv_heads, _, num_rows, _ = scores.shape
        by_head = rule.sinks.float().view(num_kv_heads, 1, -1)
        sinks = by_head.repeat(1, 1, num_rows // by_head.shape[2])[..., None]
        scores = torch.cat((scores, sinks), dim=3)
    weights = torch.softmax(scores, dim=3)[..., :num_keys]
    return torch.matmul(weights, values.float()).to(query.dtype)
