"""Splits an answer of gpt-oss into content, reasoning and calls, as it arrives.

Control tokens are recognised by their ids: the same characters in the text of a message are text. Nothing
is lost that breaks the format: text without a header is content, and a call that cannot be read is text as it
was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final

from specray.serving.tools.answer import AnswerDelta, CallDelta, Gained
from specray.serving.tools.harmony.calls import ChannelCall
from specray.serving.tools.harmony.channels import (
    ENDS,
    ChannelName,
    Channels,
    Marker,
    MessageHeader,
    is_part_of_header,
    may_be_header,
    read_header,
)
from specray.serving.tools.request import ToolMode, ToolUse

MAX_HEADER_LEN: Final = 1024
"""Characters of a header; what is longer is no header."""
_SEPARATOR: Final = "\n"
"""Between the texts of two messages of a kind."""


class _MessageKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class ChannelReader:
    """Reads one answer.

    Args:
        channels: the model's control tokens.
        use: the request's tools; None: the answer has no calls.
        opened: what of the answer's first message the prompt has, as token ids and their texts.
        tells_parts: arguments of calls are given as they are written.

    Attributes:
        num_calls: calls read so far.
    """

    def __init__(
        self,
        channels: Channels,
        use: ToolUse | None,
        *,
        opened: Sequence[tuple[int, str]] = (),
        tells_parts: bool = False,
    ) -> None:
        self.num_calls = 0
        self._markers = channels.markers
        self._use = None if use is not None and use.mode is ToolMode.NONE else use
        self._tells_parts = tells_parts
        self._waiting: list[Marker] = []
        """Control tokens whose text is held back, since it may begin a stop string."""
        self._kind: _MessageKind | None = None
        """None: a header comes, or what is between two messages."""
        self._header = ""
        self._has_role = False
        """The header is to begin with a role; else the prompt has named it, or none has to come."""
        self._head = MessageHeader()
        """What the header of the message says whose body comes."""
        self._written = ""
        self._is_unread = False
        """The message is of another's, or calls what is none of the tools: it is text as it was written."""
        self._call: ChannelCall | None = None
        self._last_chars: dict[_MessageKind, str] = {}
        """Last character of each kind that was given."""
        self._is_new = True
        """Nothing of the message's body was given."""
        self._gained = Gained()
        for token_id, text in opened:
            self.push(text, token_id)
        if self._has_role:
            self._has_role, self._header = False, read_header(self._header, has_role=True).text

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._kind is _MessageKind.REASONING

    @property
    def is_apart(self) -> bool:
        return self._kind in (None, _MessageKind.REASONING)

    def push(self, text: str, token_id: int | None = None) -> AnswerDelta:
        """What one more token brings.

        Args:
            text: what it adds to the answer's text; a control token adds its name.
        """
        marker = None if token_id is None else self._markers.get(token_id)
        if marker is not None:
            self._waiting.append(marker)
        for part in self._parts(text):
            if isinstance(part, Marker):
                self._read_marker(part)
            elif self._kind is None:
                self._read_header(part)
            else:
                self._read_body(part)
        return self._take()

    def finish(self) -> AnswerDelta:
        # The token that ended the answer has no text.
        has_ended = any(marker in ENDS for marker in self._waiting)
        if self._kind is None:
            self._end_header(is_cut=not has_ended)
        self._close()
        return self._take()

    def _parts(self, text: str) -> Iterator[str | Marker]:
        while self._waiting:
            marker = self._waiting[0]
            place = text.rfind(marker) if len(self._waiting) == 1 else text.find(marker)
            if place < 0:
                break
            if place:
                yield text[:place]
            yield self._waiting.pop(0)
            text = text[place + len(marker) :]
        if text:
            yield text

    def _read_marker(self, marker: Marker) -> None:
        if self._kind is not None and marker in (Marker.MESSAGE, Marker.CONSTRAIN):
            return
        if marker is Marker.MESSAGE:
            head = read_header(self._header, has_role=self._has_role)
            self._open(head, head.text + marker)
        elif marker is Marker.CHANNEL or marker is Marker.CONSTRAIN:
            self._close()
            self._header += marker
        else:
            if self._kind is None:
                self._end_header(is_cut=False)
            self._close()
            self._has_role = marker is Marker.START

    def _read_header(self, text: str) -> None:
        self._header += text
        is_header = _has_marker(self._header) or may_be_header(self._header, has_role=self._has_role)
        if not is_header or len(self._header) > MAX_HEADER_LEN:
            self._end_header(is_cut=False, closes=False)

    def _end_header(self, *, is_cut: bool, closes: bool = True) -> None:
        """Reads a message whose header no body followed: what is no part of a header is its body.

        Args:
            is_cut: the header might have gone on.
            closes: the message has ended.
        """
        text, has_role = self._header, self._has_role
        head = read_header(text, has_role=has_role)
        if not _has_marker(text) and not has_role:
            # The model wrote no header at all.
            head = MessageHeader(rest=text if is_cut or not closes else head.text)
        elif head.is_assistant and not (_has_marker(text) or may_be_header(text, has_role=True)):
            head = MessageHeader(rest=head.text)
        elif is_cut and is_part_of_header(head.rest):
            head = MessageHeader()
        if not head.rest.strip() and (closes and (is_cut or not head.recipient)):
            self._header, self._has_role = "", False
            return
        self._open(head, head.text)
        if head.rest and not self._is_unread:
            self._read_body(head.rest)
        if closes:
            self._close()

    def _open(self, head: MessageHeader, written: str) -> None:
        """Begins the body of a message.

        Args:
            written: the header as it was written, which is text where nothing reads the message.
        """
        self._head, self._written, self._header, self._has_role = head, written, "", False
        self._is_new, self._is_unread = True, False
        name = self._function(head)
        if name is not None:
            self._kind = _MessageKind.CALL
            limit = None if self._use is None or self._use.is_parallel else 1
            is_read = limit is None or self.num_calls < limit
            self._call = ChannelCall(self.num_calls, name, tells_parts=self._tells_parts) if is_read else None
            return
        self._kind = _MessageKind.REASONING if head.channel is ChannelName.ANALYSIS else _MessageKind.CONTENT
        self._is_unread = bool(head.recipient) or not head.is_assistant
        if self._is_unread:
            self._give(self._kind, written)

    def _function(self, head: MessageHeader) -> str | None:
        """The tool that a message calls; None: it calls none of the request's."""
        if self._use is None or not head.is_assistant:
            return None
        # Some models write the type of the content without a space after the name.
        names = (head.recipient, head.recipient.removesuffix("json"))
        return next((name for name in names if name in self._use.allowed), None)

    def _read_body(self, text: str) -> None:
        assert self._kind is not None
        if self._kind is not _MessageKind.CALL:
            self._give(self._kind, text)
        elif self._call is not None:
            self._add(self._call.push(text))

    def _close(self) -> None:
        call, kind, self._call, self._kind = self._call, self._kind, None, None
        if kind is not _MessageKind.CALL or call is None:
            return
        try:
            self._add(call.finish())
            unread = call.rest.strip()
        except (ValueError, TypeError, RecursionError):
            unread = self._written + call.body
        if unread:
            self._give(
                _MessageKind.REASONING
                if self._head.channel is ChannelName.ANALYSIS
                else _MessageKind.CONTENT,
                unread,
            )

    def _add(self, deltas: Iterator[CallDelta]) -> None:
        for delta in deltas:
            self.num_calls += delta.is_first
            self._gained.calls.append(delta)

    def _give(self, kind: _MessageKind, text: str) -> None:
        if self._is_new and self._last_chars.get(kind, _SEPARATOR) != _SEPARATOR:
            text = _SEPARATOR + text
        self._is_new = False
        self._last_chars[kind] = text[-1]
        (self._gained.content if kind is _MessageKind.CONTENT else self._gained.reasoning).append(text)

    def _take(self) -> AnswerDelta:
        gained, self._gained = self._gained, Gained()
        return gained.delta()


def _has_marker(header: str) -> bool:
    return Marker.CHANNEL in header or Marker.CONSTRAIN in header
