"""Prompts as tokens of the target, each with its category."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specray.bench.load.prompts import Prompt
from specray.tokenization import Tokenizer
from specray.tokenization.chat import ChatMessage


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt and its category; empty: it has none."""

    token_ids: tuple[int, ...]
    category: str = ""


def tokenized(tokenizer: Tokenizer, prompts: Iterable[Prompt], *, is_chat: bool) -> list[LabelledPrompt]:
    """Prompts as tokens: in the model's chat template if ``is_chat`` and it has one, else as they are."""
    in_template = is_chat and tokenizer.chat_template is not None
    return [
        LabelledPrompt(
            tokenizer.encode_chat([ChatMessage("user", one.text)])
            if in_template
            else tuple(tokenizer.encode(one.text)),
            one.category,
        )
        for one in prompts
    ]
