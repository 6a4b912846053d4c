"""Reads calls while a model writes them, so that their arguments can be told in pieces.

Arguments are told as they are written, as long as they are JSON. What has been told cannot be taken back: a
call whose arguments break off stays a call, with the arguments so far.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from specray.serving.tools.formats import MAX_CALL_LEN
from specray.serving.tools.json_prefix import JsonPrefix

MAX_HEAD_LEN: Final = 1024
"""Characters within which a call's name, and the beginning or the name of its arguments, have to come."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """What one call has gained."""

    name: str
    arguments: str
    is_first: bool
    is_last: bool
    """The arguments are complete."""


class _Place(Enum):
    HEAD = auto()
    ARGUMENTS = auto()
    REST = auto()
    """Behind the arguments, within the object of the call."""
    LOST = auto()
    """In text that is no call."""


class CallStream:
    """The calls of one region of an answer.

    Args:
        head: see ``ToolFormat.head``.
        allowed: names of the tools that may be called.
        limit: most calls to read; None: any number.

    Attributes:
        rest: text that is not part of a call that was told.
        num_calls: calls that have begun.
    """

    def __init__(self, head: re.Pattern[str], allowed: Collection[str], limit: int | None) -> None:
        self.rest = ""
        self.num_calls = 0
        self._head = head
        self._allowed = allowed
        self._limit = limit
        self._place = _Place.HEAD
        self._json = JsonPrefix()
        self._depth = 0
        """Brackets of the call's object around its arguments."""
        self._name = ""
        self._num_told = 0
        """Characters of the arguments."""

    @property
    def is_in_call(self) -> bool:
        """A call has begun and not ended, perhaps because it cannot."""
        return self._place is not _Place.HEAD and self.num_calls > 0

    def push(self, text: str) -> Iterator[CallPart]:
        """Yields what more text brings."""
        self.rest += text
        while self.rest:
            if self._place is _Place.HEAD:
                if not self._begin():
                    return
            elif self._place is _Place.ARGUMENTS:
                yield self._tell()
            elif self._place is _Place.REST:
                self._skip()
            else:
                return

    def _begin(self) -> bool:
        if self._limit is not None and self.num_calls >= self._limit:
            return False
        found = self._head.match(self.rest)
        if found is None or found["name"] not in self._allowed:
            if found is not None or len(self.rest) > MAX_HEAD_LEN:
                self._place = _Place.LOST
            return False
        self._json, self._name, self._num_told = JsonPrefix(), found["name"], 0
        self._json.push(found.groupdict().get("object") or "")
        self._depth = self._json.depth
        self._place = _Place.ARGUMENTS
        self.num_calls += 1
        self.rest = self.rest[found.end() :]
        return True

    def _tell(self) -> CallPart:
        length = self._json.push(self.rest, down_to=self._depth)
        told, self.rest = self.rest[:length], self.rest[length:]
        is_first, self._num_told = self._num_told == 0, self._num_told + len(told)
        is_last = self._json.depth == self._depth and not self._json.is_broken
        if self._json.is_broken or self._num_told > MAX_CALL_LEN:
            self._place = _Place.LOST
        elif is_last:
            self._place = _Place.REST if self._depth else _Place.HEAD
        return CallPart(self._name, told, is_first, is_last)

    def _skip(self) -> None:
        length = self._json.push(self.rest)
        self.rest = self.rest[length:]
        if self._json.is_broken:
            self._place = _Place.LOST
        elif self._json.is_whole:
            self._place = _Place.HEAD
