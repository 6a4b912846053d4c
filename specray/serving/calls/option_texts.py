"""Texts in a request's options, and their tokens: the output that it predicts, and its bad words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.errors import InvalidRequestError, shown
from specray.serving.validation import GenerationOptions, Limits
from specray.tokenization import Tokenizer

_ALLOWED = '{"type": "content", "content": a string or a list of {"type": "text", "text": a string}}'


def parse_prediction(value: object) -> str:
    """Returns the text of OpenAI's field ``prediction``; empty: it predicts nothing.

    Raises:
        InvalidRequestError: it is anything else than null or the object that OpenAI documents.
    """
    if value is None:
        return ""
    if not isinstance(value, dict) or value.keys() != {"type", "content"} or value["type"] != "content":
        raise InvalidRequestError(f"prediction is {shown(value)}; allowed: {_ALLOWED}", field="prediction")
    content = value["content"]
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"prediction.content is {shown(content)}; allowed: a string or a list of text parts",
            field="prediction.content",
        )
    return "".join(_text(part, index) for index, part in enumerate(content))


def _text(part: object, index: int) -> str:
    is_text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
    if not isinstance(part, dict) or not is_text or not isinstance(part["text"], str):
        field = f"prediction.content[{index}]"
        raise InvalidRequestError(
            f'{field} is {shown(part)}; allowed: {{"type": "text", "text": a string}}', field=field
        )
    return part["text"]


def with_prediction_ids(
    options: GenerationOptions, tokenizer: Tokenizer, limits: Limits
) -> GenerationOptions:
    """Returns the options with the tokens of their prediction; without one, the options themselves.

    No output is longer than the context, so what is beyond its length is cut off.
    """
    if not options.prediction:
        return options
    text = options.prediction[: limits.max_model_len * tokenizer.longest_token_len]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    known = tuple(token_id for token_id in token_ids if token_id < limits.vocab_size)
    return replace(options, prediction_ids=known[: limits.max_model_len])


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
