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

    Attributes:
        has_begun: a part was given, so that this stays a call.
        rest: text that is no part of what was given.
    """

    def __init__(self, index: int, name: str, *, tells_parts: bool) -> None:
        self.has_begun = False
        self.rest = ""
        self._index = index
        self._name = name
        self._call_id = make_call_id()
        self._tells_parts = tells_parts
        self._json = JsonText()
        self._num_given = 0

    def push(self, text: str) -> Iterator[CallDelta]:
        """Yields what more text brings."""
        self.rest += text
        if not self._tells_parts or self._json.is_whole or self._json.is_broken:
            return
        if not self.has_begun:
            self.rest = self.rest.lstrip()
        if not self.has_begun and not self.rest.startswith("{"):
            return
        length, given = self._json.push(self.rest)
        self.rest = self.rest[length:]
        self._num_given += length
        if self._num_given > MAX_CALL_LEN:
            self._json.is_broken = True
        if given:
            yield self._delta(given, is_last=self._json.is_whole)

    def finish(self) -> Iterator[CallDelta]:
        """Yields the call where no part of it was given. Raises ValueError: it cannot be read."""
        if self.has_begun:
            return
        if len(self.rest) > MAX_CALL_LEN:
            raise ValueError("the arguments of a call are too long")
        length, arguments = self._json.push(self.rest) if self.rest.lstrip().startswith("{") else (0, "")
        if not self._json.is_whole:
            length, arguments = len(self.rest), object_of(self.rest)
        self.rest = self.rest[length:]
        yield self._delta(arguments.strip(), is_last=True)

    def _delta(self, arguments: str, *, is_last: bool) -> CallDelta:
        is_first, self.has_begun = not self.has_begun, True
        return CallDelta(self._index, self._call_id, self._name, arguments, is_first, is_last)
