"""Prompts as users send them, and their tokenization."""

from __future__ import annotations

from collections.abc import Sequence

from specray.errors import InvalidRequestError, shown
from specray.request_options import Range
from specray.serving.validation import MAX_PROMPTS, check_range
from specray.tokenization import Tokenizer

Prompt = str | tuple[int, ...]


def parse_prompt(value: object) -> list[Prompt]:
    """Reads the ``prompt`` of the completions API: one or many strings or lists of token ids.

    Raises:
        InvalidRequestError: it is none of these, or empty.
    """
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list):
        raise _wrong(value)
    if not value:
        raise InvalidRequestError("prompt is empty; allowed: at least one token", field="prompt")
    if all(_is_int(entry) for entry in value):
        return [tuple(value)]
    check_range(Range(1, MAX_PROMPTS), "prompt", len(value), what="number of prompts in prompt")
    if all(isinstance(entry, str) for entry in value):
        return [_text(entry) for entry in value]
    if all(isinstance(entry, list) and all(_is_int(part) for part in entry) for entry in value):
        return [tuple(entry) for entry in value]
    raise _wrong(value)


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt; token ids stay as they are."""
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _text(value: str) -> str:
    if not value:
        raise InvalidRequestError("prompt is empty; allowed: at least one character", field="prompt")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt is {shown(value)}; allowed: a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids",
        field="prompt",
    )
