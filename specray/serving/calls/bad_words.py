"""Turns the words that an output must not contain into the token sequences that write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.serving.validation import GenerationOptions
from specray.tokenization import Tokenizer


def with_bad_word_ids(options: GenerationOptions, tokenizer: Tokenizer) -> GenerationOptions:
    """Returns the options with the ids of their bad words; without any, the options themselves."""
    if not options.bad_words:
        return options
    return replace(options, bad_word_ids=bad_word_ids(options.bad_words, tokenizer))


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the beginning of a text and within one, behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids:
                found[token_ids] = None
    return tuple(found)
