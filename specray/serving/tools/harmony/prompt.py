"""Where in a message of gpt-oss a prompt ends: the answer goes on there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from specray.serving.tools.harmony.answer import ChannelReader
from specray.serving.tools.harmony.channels import ASSISTANT, ENDS, ChannelName, Channels, Marker, read_header
from specray.serving.tools.request import ToolUse
from specray.types import Grammar


class PromptEnd(Enum):
    """Where a prompt ends."""

    BETWEEN = "between two messages"
    ROLE = "after the role of the answer's message"
    REASONING = "in reasoning"
    CONTENT = "in content"
    OTHER = "in the header of a message or in a call"


@dataclass(frozen=True, slots=True)
class ChannelPrompt:
    """The end of one prompt."""

    channels: Channels
    place: PromptEnd
    header: tuple[tuple[int, str], ...] = ()
    """The beginning of the message that the answer goes on with, as tokens and their texts."""

    def reader(self, use: ToolUse | None, *, tells_parts: bool) -> ChannelReader:
        return ChannelReader(self.channels, use, opened=self.header, tells_parts=tells_parts)

    def under(self, grammar: Grammar | None) -> ChannelPrompt:
        """The same prompt for an answer that a grammar binds from its first token on.

        Where the prompt ends in reasoning, the answer is content, unless the grammar itself names channels.
        """
        if grammar is None or self.place is not PromptEnd.REASONING or self.channels.are_spelt_by(grammar):
            return self
        ids = self.channels.ids
        header = tuple((ids[marker], str(marker)) for marker in (Marker.START, Marker.MESSAGE))
        return ChannelPrompt(self.channels, PromptEnd.CONTENT, header)


def read_prompt(channels: Channels, token_ids: Sequence[int], text_of: Callable[[int], str]) -> ChannelPrompt:
    """Finds the message that has begun at a prompt's end.

    Args:
        text_of: the text of one token.
    """
    header = _header(channels, token_ids)
    if header is None:
        return ChannelPrompt(channels, PromptEnd.BETWEEN)
    opened = tuple((token_id, text_of(token_id)) for token_id in header)
    text = "".join(piece for _, piece in opened[1:])
    head = read_header(text.removesuffix(Marker.MESSAGE), has_role=True)
    if text.strip() == ASSISTANT:
        place = PromptEnd.ROLE
    elif not text.endswith(Marker.MESSAGE) or head.recipient:
        place = PromptEnd.OTHER
    else:
        place = PromptEnd.REASONING if head.channel is ChannelName.ANALYSIS else PromptEnd.CONTENT
    return ChannelPrompt(channels, place, opened)


def _header(channels: Channels, token_ids: Sequence[int]) -> Sequence[int] | None:
    ids = channels.ids
    ends = {ids[marker] for marker in ENDS if marker in ids}
    for start in range(len(token_ids) - 1, -1, -1):
        if token_ids[start] in ends:
            return None
        if token_ids[start] == ids[Marker.START]:
            opened = token_ids[start:]
            if ids[Marker.MESSAGE] in opened:
                return opened[: opened.index(ids[Marker.MESSAGE]) + 1]
            return opened
    return None
