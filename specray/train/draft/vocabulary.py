"""Chooses the tokens that a draft can propose: those that the target writes, not all that it knows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

_MULTIPLE = 64


def frequent_ids(
    token_ids: npt.NDArray[np.integer],
    *,
    share: float,
    max_num_ids: int,
    always: Collection[int] = (),
) -> npt.NDArray[np.int64]:
    """Returns the most frequent ids, ascending, that cover a share of a text.

    Zhao et al., *FR-Spec*, arXiv 2502.14856: a draft's last product is with the vocabulary, and most of it is
    never written.

    Args:
        token_ids: what the target wrote, any shape.
        share: of the tokens, in (0, 1].
        max_num_ids: most ids.
        always: ids that are taken whatever their frequency, such as the end of a turn.
    """
    counts = np.bincount(token_ids.reshape(-1))
    order = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[order]) / max(int(counts.sum()), 1)
    num_ids = int(np.searchsorted(covered, share)) + 1
    num_ids = min(-(-num_ids // _MULTIPLE) * _MULTIPLE, max_num_ids, int((counts > 0).sum()))
    chosen = dict.fromkeys(int(token_id) for token_id in always)
    for token_id in order:
        if len(chosen) >= max(num_ids, len(always)):
            break
        chosen.setdefault(int(token_id))
    return np.sort(np.fromiter(chosen, np.int64, len(chosen)))
