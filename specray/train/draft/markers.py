"""Reads off a chat template which tokens stand around the turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specray.errors import ConfigError

_USER, _ANSWER, _NEXT = "\x00user\x00", "\x00answer\x00", "\x00next\x00"


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """Token ids around turns. The first of each marker between turns ends the turn before it."""

    opening: tuple[int, ...]
    """What a conversation begins with, up to the user's first words."""
    to_assistant: tuple[int, ...]
    """What stands between the user's last word and the answer."""
    to_user: tuple[int, ...]
    """What stands between the answer's last word and the user's next."""


def turn_markers(tokenizer: Any) -> TurnMarkers:
    """Renders a conversation of three turns, and returns what stands around them.

    Args:
        tokenizer: of transformers, with a chat template.

    Raises:
        ConfigError: the template changes what users write, drops a turn, or ends turns with white space
            alone, as lines end: a turn would be a line.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the target has no chat template, so it cannot write conversations")
    messages = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = []
    for content in (_USER, _ANSWER, _NEXT):
        piece, found, text = text.partition(content)
        if not found:
            raise ConfigError("the target's chat template drops or changes the text of a turn")
        pieces.append(piece)
    opening, _, to_user = pieces
    if not (text.strip() and to_user.strip()):
        raise ConfigError("the target's chat template puts nothing or only white space between turns")
    ids = [tuple(tokenizer.encode(piece, add_special_tokens=False)) for piece in (opening, text, to_user)]
    return TurnMarkers(*ids)
