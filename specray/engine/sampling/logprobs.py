"""Logprobs that users see: natural logs of the model's distribution before any processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.types import TokenLogprobs

_MAX_ROWS = 64
"""Number of rows that are converted at once; of a large vocabulary each takes megabytes."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """The logprob of each chosen token and of the ``num_top`` likeliest tokens at its position.

    Args:
        logits: unprocessed, ``[len(token_ids), vocab_size]``.
        token_ids: the token chosen in each row.
        num_top: 0 gives only the chosen token's.
    """
    if len(token_ids) > _MAX_ROWS:
        parts = (range(start, start + _MAX_ROWS) for start in range(0, len(token_ids), _MAX_ROWS))
        return tuple(
            row
            for part in parts
            for row in token_logprobs(
                logits[part.start : part.stop], token_ids[part.start : part.stop], num_top
            )
        )
    logprobs = logits.double().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return tuple(
        TokenLogprobs(token_id, logprob, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, top_ids, top_logprobs in zip(
            token_ids, chosen, top.indices.tolist(), top.values.tolist(), strict=True
        )
    )
