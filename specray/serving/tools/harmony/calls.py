"""Reads the body of one message that calls a function: its arguments as JSON, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from specray.serving.tools.answer import CallDelta, make_call_id
from specray.serving.tools.json_text import JsonText, object_of
from specray.serving.tools.reader import MAX_CALL_LEN


class ChannelCall:
    """One call.

    Args:
        index: place of the call in its answer.
        name: the function.
        tells_parts: the arguments are given as they are written.
    """

    def __init__(self, index: int, name: str, *, tells_parts: bool) -> None:
        self._index = index
        self._name = name
        self._call_id = make_call_id()
        self._tells_parts = tells_parts
        self._has_begun = False
        """A part was given, so that this stays a call."""
        self._json = JsonText()
        self._body: list[str] = []
        self._length = 0
        self._arguments: list[str] = []
        self._unread = ""
        """Text of which more text decides."""
        self._has_ended = False
        self._rest: list[str] = []
        """Text after the end of the arguments."""

    @property
    def body(self) -> str:
        return "".join(self._body)

    @property
    def rest(self) -> str:
        """Text that is no part of the arguments."""
        return "".join([*self._rest, self._unread])

    def push(self, text: str) -> Iterator[CallDelta]:
        self._body.append(text)
        self._length += len(text)
        if self._has_ended:
            self._rest.append(text)
            return
        self._unread += text
        if not self._arguments:
            self._unread = self._unread.lstrip()
        is_object = bool(self._arguments) or self._unread.startswith("{")
        length, arguments = self._json.push(self._unread) if is_object else (0, "")
        self._unread = self._unread[length:]
        if arguments:
            self._arguments.append(arguments)
        if self._is_over(is_object):
            self._has_ended, self._rest, self._unread = True, [self._unread], ""
        if arguments and self._tells_parts:
            yield self._delta(arguments, is_last=self._json.is_whole)

    def finish(self) -> Iterator[CallDelta]:
        """Yields the call where no part of it was given. Raises ValueError, TypeError: it cannot be read."""
        if self._has_begun:
            return
        if not self._json.is_whole:
            if self._length > MAX_CALL_LEN:
                raise ValueError("the arguments of a call are too long")
            self._arguments, self._rest, self._unread = [object_of(self.body)], [], ""
        yield self._delta("".join(self._arguments), is_last=True)

    def _is_over(self, is_object: bool) -> bool:
        if self._json.is_whole or self._json.is_broken or self._length > MAX_CALL_LEN:
            return True
        return bool(self._unread) and not is_object

    def _delta(self, arguments: str, *, is_last: bool) -> CallDelta:
        is_first, self._has_begun = not self._has_begun, True
        return CallDelta(self._index, self._call_id, self._name, arguments, is_first, is_last)
