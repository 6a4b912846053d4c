"""Prompts as tokens of the target, each with its category, and after a long context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specray.bench.load.prompts import Prompt, load_labelled_prompts
from specray.config import Config
from specray.errors import ConfigError
from specray.tokenization import Tokenizer, load_tokenizer
from specray.tokenization.chat import ChatMessage

if TYPE_CHECKING:
    from specray.bench.plans import MethodsPlan


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


def methods_prompts(config: Config, plan: MethodsPlan) -> list[LabelledPrompt]:
    """The prompts after which an output has room, each after its piece of ``plan.context``."""
    tokenizer = load_tokenizer(config.target.model)
    loaded = load_labelled_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    if plan.context is not None:
        pieces = contexts(plan.context, tokenizer, num_tokens=plan.context_tokens, count=len(loaded))
        loaded = [
            replace(prompt, text=f"{piece}\n\n{prompt.text}")
            for piece, prompt in zip(pieces, loaded, strict=True)
        ]
    # Most tokens of prompt and output where neither an option nor the configuration says.
    longest = (config.target.max_model_len or 2048) - plan.max_tokens
    found = tokenized(tokenizer, loaded, is_chat=plan.chat)
    return [one for one in found if len(one.token_ids) <= longest]


def contexts(path: Path, tokenizer: Tokenizer, *, num_tokens: int, count: int) -> list[str]:
    """Consecutive pieces of a text, each of ``num_tokens``.

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
