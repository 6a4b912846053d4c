"""Long contexts of prompts, cut from a text file."""

from __future__ import annotations

from pathlib import Path

from specray.errors import ConfigError
from specray.tokenization import Tokenizer


def contexts(path: Path, tokenizer: Tokenizer, *, num_tokens: int, count: int) -> list[str]:
    """Consecutive pieces of a text, each of so many tokens.

    Raises:
        ConfigError: the file cannot be read, or is too short.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--context {path} cannot be read: {error}") from None
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) < num_tokens * count:
        raise ConfigError(
            f"--context {path} has {len(token_ids)} tokens; allowed: at least {num_tokens * count}, "
            f"--context-tokens for each of {count} prompts"
        )
    starts = range(0, num_tokens * count, num_tokens)
    return [tokenizer.decode(token_ids[start : start + num_tokens]) for start in starts]
