"""Whether a draft can be used with a target whose tokenizer is another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from specray.config.engine import VocabularyMode
from specray.tokenization.loading import load_tokenizer
from specray.tokenization.overlap import difference
from specray.tokenization.partners import Partners


def load_partners(
    draft: str | Path, target: str | Path, sizes: tuple[int, int] = (sys.maxsize, sys.maxsize)
) -> Partners:
    """The tokens of two checkpoints. Raises ConfigError for a tokenizer that cannot be loaded."""
    return Partners(load_tokenizer(draft), load_tokenizer(target), sizes)


def partners_problem(partners: Partners, mode: VocabularyMode) -> str | None:
    """Says why tokenizers that differ do not fit together in a mode, with their overlap; None: they do."""
    if mode == "intersect" and not partners.draft_ids:
        return f"{partners.overlap}; allowed with draft.vocabulary 'intersect': some"
    if mode != "intersect" and not partners.can_write:
        return (
            f"{partners.overlap}; allowed with draft.vocabulary {mode!r}: the same vocabulary, or two "
            "tokenizers that can write any text"
        )
    return None


def pair_problem(
    draft: Mapping[str, int],
    target: Mapping[str, int],
    mode: VocabularyMode,
    *,
    draft_path: str | Path,
    target_path: str | Path,
) -> str | None:
    """Says why a draft's tokenizer does not fit the target's; None: it does.

    Args:
        draft, target: ids by token.
        mode: what ``draft.vocabulary`` says.
    """
    told = difference(draft, target)
    if told is None:
        return None
    if mode == "same":
        return f"{told}; allowed: the same vocabulary"
    return partners_problem(load_partners(draft_path, target_path), mode)
