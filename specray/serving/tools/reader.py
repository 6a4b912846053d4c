"""Reads the calls of an answer while they are written: what all formats of calls have in common.

A reader begins at a marker and is fed pieces of any size. Each of its decisions needs the text alone, never
how it was cut: a pattern that may still match waits for more. Arguments are given as they are written. A call
that turns out to be none, or breaks off, leaves its text in ``raw`` and ``rest``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import regex

MAX_CALL_LEN: Final = 262_144
"""Characters of one call's text; what is longer is no call."""
MAX_HEAD_LEN: Final = 1024
"""Characters within which the parts of a call's syntax have to come, other than its arguments."""
SPACE: Final = r"\s{0,64}+"
NAME: Final = r"(?P<name>[\w.-]{1,256}+)"
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by tool name."""
_PIECE_LEN: Final = 4096
"""Characters that are read at a time: each step copies what is left of them."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """What one call has gained."""

    name: str
    arguments: str
    is_first: bool
    is_last: bool
    """The arguments are complete."""
    call_id: str = ""
    """The id that the model has written; empty: none."""


class CallPlace(Enum):
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
    """What is left of the call's object after its arguments."""
    NEXT = auto()
    """Another call, or the marker that ends calls."""
    END = auto()
    """Text that belongs to no call."""
    LOST = auto()
    """Text that is no call, or cannot continue the one that was read."""


_COMPLETE: Final = (CallPlace.HEAD, CallPlace.REST, CallPlace.NEXT, CallPlace.END)
"""Where the arguments of the last call are complete."""


class CallReader(ABC):
    """Reads calls from a marker on, to where no other call follows.

    Args:
        allowed: names of the tools that may be called.

    Attributes:
        place: what comes next. END and LOST: the reader reads no more.
        raw: text of the call that is read, as far as it was read.
        rest: text that was not read.
        num_calls: calls of which parts were given.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self.rest = ""
        self.num_calls = 0
        self.place = CallPlace.HEAD
        self._allowed = allowed
        self._name = ""
        self._call_id = ""
        self._num_told = 0
        """Characters of the call's arguments."""
        self._raw: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def push(self, text: str) -> Iterator[CallPart]:
        for start in range(0, len(text), _PIECE_LEN):
            self.rest += text[start : start + _PIECE_LEN]
            if self.place not in (CallPlace.END, CallPlace.LOST):
                yield from self._read()

    def finish(self) -> Iterator[CallPart]:
        return iter(())

    def _read(self) -> Iterator[CallPart]:
        steps = self._steps()
        while self.rest and self.place in steps:
            before = self.place, len(self.rest)
            told = steps[self.place]()
            if told:
                yield self._part(told)
            if self._num_told > MAX_CALL_LEN or len(self.rest) > MAX_CALL_LEN + _PIECE_LEN:
                self.place = CallPlace.LOST
            if self.place in _COMPLETE:
                self._raw.clear()
            if (self.place, len(self.rest)) == before:
                return

    @abstractmethod
    def _steps(self) -> Mapping[CallPlace, Callable[[], str]]:
        """What reads on at each place, and returns the part of the arguments that it found, if any."""

    def _part(self, told: str) -> CallPart:
        is_first, is_last = not self._num_told, self.place in _COMPLETE
        self.num_calls += is_first
        self._num_told = 0 if is_last else self._num_told + len(told)
        return CallPart(self._name, told, is_first, is_last, self._call_id)

    def _begin(self, head: regex.Pattern[str]) -> regex.Match[str] | None:
        """Reads the head of a call, whose groups are ``name``, the tool, and perhaps ``id``.

        None: it is not complete, or this is no call.
        """
        found = head.match(self.rest, partial=True)
        if found is None or (not found.partial and found["name"].strip("\"' ") not in self._allowed):
            self.place = CallPlace.LOST
        if found is None or found.partial or self.place is CallPlace.LOST:
            return None
        self._name = found["name"].strip("\"' ")
        self._call_id = found.groupdict().get("id") or ""
        self._raw.clear()
        self._take(found.end())
        return found

    def _go_on(self, closing: regex.Pattern[str] | None, again: regex.Pattern[str]) -> None:
        """Reads on from the end of a call: to the marker that ends calls, or to another call."""
        waits = False
        for pattern, place in ((closing, CallPlace.END), (again, CallPlace.HEAD)):
            found = None if pattern is None else pattern.match(self.rest, partial=True)
            if found is not None and not found.partial:
                self.place = place
                self._take(found.end())
                return
            waits = waits or found is not None
        if not waits:
            self.place = CallPlace.END

    def _take(self, length: int) -> None:
        if length:
            self._raw.append(self.rest[:length])
            self.rest = self.rest[length:]
