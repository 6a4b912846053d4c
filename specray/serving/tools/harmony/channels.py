"""The control tokens of gpt-oss's format, and what the header of a message says.

A message is ``<|start|>HEADER<|message|>BODY<|end|>``; the last one ends with ``<|return|>`` or ``<|call|>``
(OpenAI's harmony format). A header names a role, a channel, and for a call its recipient, before or after
the channel: ``assistant<|channel|>commentary to=functions.NAME <|constrain|>json``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from specray.grammar.sources import named_tokens
from specray.types import Grammar


class Marker(StrEnum):
    """A control token of the format."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


class ChannelName(StrEnum):
    """A channel of the assistant's messages."""

    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"


ASSISTANT: Final = "assistant"
ENDS: Final = (Marker.END, Marker.RETURN, Marker.CALL)
"""What ends a message."""
_NEEDED: Final = (Marker.START, Marker.CHANNEL, Marker.MESSAGE, Marker.END)
"""Control tokens without which a model does not write this format."""
_NO_RECIPIENTS: Final = (ASSISTANT, "user", "all")
"""Recipients of a message that calls nothing."""
_FUNCTIONS: Final = "functions."
"""Namespace of a request's tools."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s{0,64}([^\s<]*)")
_KNOWN_CHANNEL: Final = re.compile("|".join(ChannelName))
_RECIPIENT: Final = re.compile(r"\bto\s{0,8}=\s{0,8}([^\s<{]+)|(?<!\S)(functions\.[^\s<{]+)")
_CONTENT_TYPE: Final = re.compile(r"<\|constrain\|>\s{0,64}\w{0,64}")
_CALL_TYPE: Final = re.compile(r"^\s{0,64}(?:json|code)")
_ROLE: Final = re.compile(r"\s{0,64}([^\s<]*)")
_STARTS: Final = (ASSISTANT, "to=", _FUNCTIONS)
"""What may come before the first control token of a header whose role is known."""
_PARTS: Final = (*ChannelName, "to=", _FUNCTIONS, "json")
"""What may come after it."""


@dataclass(frozen=True, slots=True)
class MessageHeader:
    is_assistant: bool = True
    channel: ChannelName | None = None
    """None: it names none that is known."""
    recipient: str = ""
    """Name of the function that is called, without its namespace; empty: there is none."""
    rest: str = ""
    """Text that belongs to none of these."""
    text: str = ""
    """The header as it was written, without the assistant's role."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The control tokens of one vocabulary."""

    ids: Mapping[Marker, int]

    @classmethod
    def find(cls, template: str | None, token_id: Callable[[str], int | None]) -> Self | None:
        """The tokens of a model whose chat template writes this format; None for any other model.

        Args:
            template: Jinja source.
            token_id: returns the id of an added token by its text.
        """
        if template is None or not all(marker in template for marker in _NEEDED):
            return None
        ids = {marker: found for marker in Marker if (found := token_id(marker)) is not None}
        return cls(ids) if all(marker in ids for marker in _NEEDED) else None

    @property
    def markers(self) -> dict[int, Marker]:
        return {token_id: marker for marker, token_id in self.ids.items()}

    def are_spelt_by(self, grammar: Grammar) -> bool:
        """Whether a grammar asks for control tokens of the format, so that it binds headers, too."""
        return any(
            token in self.ids
            if isinstance(token, str)
            else any(token_id in token for token_id in self.ids.values())
            for token in named_tokens(grammar)
        )


def read_header(text: str, *, has_role: bool) -> MessageHeader:
    """Reads the text of a header with its control tokens.

    Models repeat and misspell parts of headers: the last channel that is known counts, and the last
    recipient that is a function.

    Args:
        has_role: it begins with the role; else only the assistant's may be there.
    """
    role, own = _split_role(text, has_role=has_role)
    channels = [
        ChannelName(found[0]) for word in _CHANNEL.findall(own) if (found := _KNOWN_CHANNEL.search(word))
    ]
    named = [left or right for left, right in _RECIPIENT.findall(own)]
    recipients = [name.removeprefix(_FUNCTIONS) for name in named if name not in _NO_RECIPIENTS]
    rest = _CONTENT_TYPE.sub("", _RECIPIENT.sub("", _CHANNEL.sub(_unknown_channel, own)))
    return MessageHeader(
        is_assistant=role in ("", ASSISTANT),
        channel=channels[-1] if channels else None,
        recipient=recipients[-1] if recipients else "",
        rest=(_CALL_TYPE.sub("", rest) if recipients else rest).strip(),
        text=own if role in ("", ASSISTANT) else text,
    )


def may_be_header(text: str, *, has_role: bool) -> bool:
    """Whether text without a control token may be the beginning of a header.

    Args:
        has_role: it begins with a role, of which only the assistant's says what follows.
    """
    role, own = _split_role(text, has_role=has_role)
    if role not in ("", ASSISTANT):
        return True
    own = own.lstrip()
    return not own or any(start.startswith(own) or own.startswith(start) for start in _STARTS)


def is_part_of_header(rest: str) -> bool:
    """Whether the rest of a header that was cut is the beginning of a word of it."""
    return any(part.startswith(rest) for part in _PARTS)


def _unknown_channel(found: re.Match[str]) -> str:
    return "" if _KNOWN_CHANNEL.search(found[1]) else found[1]


def _split_role(text: str, *, has_role: bool) -> tuple[str, str]:
    head = _ROLE.match(text)
    assert head is not None
    word = head[1]
    if word.startswith(ASSISTANT):
        # Some models write it twice.
        num_roles = len(word) // len(ASSISTANT)
        while not word.startswith(ASSISTANT * num_roles):
            num_roles -= 1
        return ASSISTANT, text[head.start(1) + num_roles * len(ASSISTANT) :]
    if has_role and not word.startswith(("to=", _FUNCTIONS)):
        return word, text[head.end() :]
    return "", text
