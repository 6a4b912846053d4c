"""Whether a draft can be used with a target whose tokenizer is another, and how their vocabularies differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from specray.config.engine import VocabularyMode
from specray.tokenization.fingerprint import ModelVocabulary
from specray.tokenization.loading import load_tokenizer
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
    draft: ModelVocabulary,
    target: ModelVocabulary,
    mode: VocabularyMode,
    *,
    draft_path: str | Path,
    target_path: str | Path,
) -> str | None:
    """Why a draft's vocabulary does not fit the target's in ``draft.vocabulary``'s mode; None: it does."""
    told = difference(draft, target)
    if told is None:
        return None
    if mode == "same":
        return f"{told}; allowed: the same vocabulary"
    return partners_problem(load_partners(draft_path, target_path), mode)


def difference(draft: ModelVocabulary, target: ModelVocabulary) -> str | None:
    """Describes in words how a draft's vocabulary differs from the target's; None: they are equal."""
    if draft.fingerprint == target.fingerprint:
        return None
    ours, theirs = _strings(target.ids), _strings(draft.ids)
    ids = sorted(ours.keys() | theirs.keys())
    different = [token_id for token_id in ids if ours.get(token_id) != theirs.get(token_id)]
    first, most = different[0], max(len(ours), len(theirs))
    return (
        f"{len(ids) - len(different)} of {most} token ids mean the same string; the first that does not is "
        f"{first}, {_named(theirs, first)} in the draft and {_named(ours, first)} in the target"
    )


def _strings(vocabulary: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    strings: dict[int, tuple[str, ...]] = {}
    for token, token_id in sorted(vocabulary.items()):
        strings[token_id] = (*strings.get(token_id, ()), token)
    return strings


def _named(strings: Mapping[int, tuple[str, ...]], token_id: int) -> str:
    return " or ".join(repr(token) for token in strings[token_id]) if token_id in strings else "unknown"
