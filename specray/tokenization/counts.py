"""Counts the token ids of text files, to choose those that a trimmed draft vocabulary keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specray.errors import ConfigError
from specray.tokenization.tokenizer import Tokenizer

PIECE_CHARS = 1 << 18
"""Characters that are encoded at a time, at least; a piece ends where a line does."""


class FrequentIds(NamedTuple):
    """The most frequent token ids of some text."""

    token_ids: list[int]
    """Ascending."""
    share: float
    """Share of the text's tokens that they are, 0 to 1."""
    num_tokens: int
    """Tokens of the text."""


def frequent_ids(
    files: Sequence[Path], tokenizer: Tokenizer, *, share: float, vocab_size: int
) -> FrequentIds:
    """The fewest ids that are ``share`` of the files' tokens, and every special token's.

    Of equally frequent ids the lower ones come first. Special tokens stand in no text but end answers.

    Args:
        vocab_size: token ids of the model, which may have no row for the last special tokens.

    Raises:
        ConfigError: a file cannot be read, or there is no token in any.
    """
    counts: Counter[int] = Counter()
    for file in files:
        for piece in _pieces(file):
            counts.update(tokenizer.encode(piece, add_special_tokens=False))
    special_ids = (*tokenizer.special_names.values(), *tokenizer.eos_token_ids)
    num_tokens = counts.total()
    if not num_tokens:
        raise ConfigError(f"{', '.join(map(str, files))}: no text; allowed: files with at least one token")
    chosen = {token_id for token_id in special_ids if token_id < vocab_size}
    num_covered = 0
    for token_id, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if num_covered >= share * num_tokens:
            break
        chosen.add(token_id)
        num_covered += count
    covered = sum(counts[token_id] for token_id in chosen)
    return FrequentIds(sorted(chosen), covered / num_tokens, num_tokens)


def _pieces(file: Path) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    try:
        with file.open(encoding="utf-8") as stream:
            for line in stream:
                lines.append(line)
                size += len(line)
                if size >= PIECE_CHARS:
                    yield "".join(lines)
                    lines, size = [], 0
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if lines:
        yield "".join(lines)
