"""Reads calls while a model writes them, so that their arguments can be told in pieces.

Arguments are told as they are written, as long as they are JSON. What has been told cannot be taken back: a
call whose arguments break off stays a call, with the arguments so far.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
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


class Place(Enum):
    """What comes next in the text of calls."""

    HEAD = auto()
    ARGUMENTS = auto()
    """All arguments, as JSON."""
    BETWEEN = auto()
    """What is between two arguments that are written one by one."""
    TEXT = auto()
    """An argument that is a string."""
    VALUE = auto()
    """Another argument."""
    REST = auto()
    """What is behind the arguments within the object of the call."""
    END = auto()
    """What is behind the only call of a region."""
    LOST = auto()
    """Text that is no call."""


class CallReader(ABC):
    """Reads the calls of one region of an answer while they are written.

    Args:
        allowed: names of the tools that may be called.
        limit: most calls to read; None: any number.

    Attributes:
        rest: text that is not part of a call that was told.
        num_calls: calls that have begun.
    """

    def __init__(self, allowed: Collection[str], limit: int | None) -> None:
        self.rest = ""
        self.num_calls = 0
        self.place = Place.HEAD
        self._allowed = allowed
        self._limit = limit
        self._name = ""
        self._num_told = 0
        """Characters of the call's arguments."""

    @property
    def is_in_call(self) -> bool:
        """A call has begun and not ended, perhaps because it cannot."""
        return self.num_calls > 0 and self.place not in (Place.HEAD, Place.END)

    def push(self, text: str) -> Iterator[CallPart]:
        """Yields what more text brings."""
        self.rest += text
        steps = self._steps()
        while self.rest and self.place in steps:
            before = self.place, len(self.rest)
            told = steps[self.place]()
            if told:
                is_first, self._num_told = self._num_told == 0, self._num_told + len(told)
                is_last = self.place in (Place.HEAD, Place.REST, Place.END)
                yield CallPart(self._name, told, is_first, is_last)
            if self._num_told > MAX_CALL_LEN:
                self.place = Place.LOST
            if (self.place, len(self.rest)) == before:
                return

    def finish(self) -> Iterator[CallPart]:
        """Yields what the end of the region makes known."""
        return iter(())

    @abstractmethod
    def _steps(self) -> Mapping[Place, Callable[[], str]]:
        """What reads on at each place, and returns the part of the arguments that it found, if any."""

    def _begin(self, head: re.Pattern[str]) -> re.Match[str] | None:
        """Reads the head of a call, whose group ``name`` is the tool. None: none has come."""
        if self._limit is not None and self.num_calls >= self._limit:
            return None
        found = head.match(self.rest)
        if found is None or found["name"].strip() not in self._allowed:
            if found is not None or len(self.rest) > MAX_HEAD_LEN:
                self.place = Place.LOST
            return None
        self._name, self._num_told = found["name"].strip(), 0
        self.num_calls += 1
        self.rest = self.rest[found.end() :]
        return found


class CallStream(CallReader):
    """Calls whose arguments are written as JSON.

    Args:
        head: see ``ToolFormat.head``.
        allowed: as for ``CallReader``.
        limit: the same.
    """

    def __init__(self, head: re.Pattern[str], allowed: Collection[str], limit: int | None) -> None:
        super().__init__(allowed, limit)
        self._head = head
        self._json = JsonPrefix()
        self._depth = 0
        """Brackets of the call's object around its arguments."""

    def _steps(self) -> Mapping[Place, Callable[[], str]]:
        return {Place.HEAD: self._begin_call, Place.ARGUMENTS: self._tell, Place.REST: self._skip}

    def _begin_call(self) -> str:
        found = self._begin(self._head)
        if found is not None:
            self._json = JsonPrefix()
            self._json.push(found.groupdict().get("object") or "")
            self._depth = self._json.depth
            self.place = Place.ARGUMENTS
        return ""

    def _tell(self) -> str:
        length = self._json.push(self.rest, down_to=self._depth)
        told, self.rest = self.rest[:length], self.rest[length:]
        if self._json.is_broken:
            self.place = Place.LOST
        elif self._json.depth == self._depth:
            self.place = Place.REST if self._depth else Place.HEAD
        return told

    def _skip(self) -> str:
        length = self._json.push(self.rest)
        self.rest = self.rest[length:]
        if self._json.is_broken:
            self.place = Place.LOST
        elif self._json.is_whole:
            self.place = Place.HEAD
        return ""
