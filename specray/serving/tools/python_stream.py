"""Reads calls that are written as Python, and tells their keyword arguments as JSON while they come.

A string is told as it is written; any other argument when it is complete. What has been told cannot be taken
back: a call that breaks off stays a call, with the arguments so far.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Final

from specray.serving.tools.call_stream import MAX_HEAD_LEN, CallReader, Place
from specray.serving.tools.formats import MAX_CALL_LEN, json_of

_SPACE: Final = r"\s{0,64}+"
_KEY: Final = rf"[^\W\d]\w{{0,255}}+{_SPACE}="
_HEAD: Final = re.compile(
    rf"(?:{_SPACE},)?{_SPACE}(?P<name>[^\W\d][\w.]{{0,63}}+){_SPACE}\((?={_SPACE}(?:\)|{_KEY}))"
)
_END: Final = re.compile(rf"{_SPACE}(?:,{_SPACE})?\)")
_ARGUMENT: Final = re.compile(
    rf"{_SPACE}(?P<comma>,?){_SPACE}(?P<key>[^\W\d]\w{{0,255}}+){_SPACE}={_SPACE}(?=\S[\s\S])"
)
_ESCAPE: Final = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}\n]{1,100}\}|[^xuUN0-7]"
_WHOLE_ESCAPE: Final = rf"{_ESCAPE}|[0-7]{{3}}|[0-7]{{1,2}}(?![0-7]|\Z))"
"""An escape of a string that no more text changes."""
_ESCAPES: Final = re.compile(rf"{_ESCAPE}|[0-7]{{1,3}})", re.DOTALL)
_LONGEST_ESCAPE: Final = 104
_TEXTS: Final = {
    quote: re.compile(rf"(?:[^\\\n{quote}]++|{_WHOLE_ESCAPE})*+", re.DOTALL) for quote in ("'", '"')
}
"""What a string holds, up to its end or to what is no part of one yet, by its quote."""
_SHORT: Final = {
    "\n": "",
    **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)),
    **{char: char for char in "\\'\""},
}


class PythonStream(CallReader):
    """The calls of one region of an answer.

    Args:
        allowed: as for ``CallReader``.
        limit: the same.
    """

    def __init__(self, allowed: Collection[str], limit: int | None) -> None:
        super().__init__(allowed, limit)
        self._keys: set[str] = set()
        """Arguments of the call so far."""
        self._quote = ""
        """Quote of the string that is written."""
        self._value = _ValueEnd()

    def _steps(self) -> Mapping[Place, Callable[[], str]]:
        return {
            Place.HEAD: self._begin_call,
            Place.BETWEEN: self._go_on,
            Place.TEXT: self._tell_text,
            Place.VALUE: self._tell_value,
        }

    def _begin_call(self) -> str:
        if self._begin(_HEAD) is None:
            return ""
        self.place, self._keys = Place.BETWEEN, set()
        return "{"

    def _go_on(self) -> str:
        """Reads on to an argument, or to the end of the call."""
        if end := _END.match(self.rest):
            self.place, self.rest = Place.HEAD, self.rest[end.end() :]
            return "}"
        found = _ARGUMENT.match(self.rest)
        if found is None:
            if len(self.rest) > MAX_HEAD_LEN:
                self.place = Place.LOST
            return ""
        key = found["key"]
        if key in self._keys or bool(found["comma"]) != bool(self._keys):
            self.place = Place.LOST
            return ""
        self.rest = self.rest[found.end() :]
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._quote = self.rest[0] if self.rest[0] in _TEXTS and self.rest[1] != self.rest[0] else ""
        self.rest = self.rest[len(self._quote) :]
        self.place, self._value = (Place.TEXT if self._quote else Place.VALUE), _ValueEnd()
        return f"{comma}{json_of(key)}: " + '"' * bool(self._quote)

    def _tell_text(self) -> str:
        found = _TEXTS[self._quote].match(self.rest)
        assert found is not None, "the pattern matches an empty text"
        rest = self.rest[found.end() :]
        try:
            told = json_of(_ESCAPES.sub(_unescaped, found[0]))[1:-1]
        except (ValueError, OverflowError, KeyError):
            self.place = Place.LOST
            return ""
        if rest.startswith(self._quote):
            self.place, self.rest = Place.BETWEEN, rest[1:]
            return told + '"'
        self.rest = rest
        if rest.startswith("\n") or len(rest) > _LONGEST_ESCAPE:
            self.place = Place.LOST
        return told

    def _tell_value(self) -> str:
        end = self._value.find(self.rest)
        if end is None:
            if len(self.rest) > MAX_CALL_LEN:
                self.place = Place.LOST
            return ""
        try:
            told = json_of(ast.literal_eval(self.rest[:end].strip()))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            self.place = Place.LOST
            return ""
        self.place, self.rest = Place.BETWEEN, self.rest[end:]
        return told


class _ValueEnd:
    """Finds where a literal ends that comes in pieces."""

    def __init__(self) -> None:
        self._num_read = 0
        self._depth = 0
        """Brackets that are open."""
        self._quote = ""
        """Quote of the string that is open."""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Returns where the literal ends with which ``text`` begins, or None. It is longer at each call."""
        for place in range(self._num_read, len(text)):
            char = text[place]
            if self._quote:
                is_end = char == self._quote and not self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
                self._quote = "" if is_end else self._quote
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif not self._depth and char in ",)":
                return place
            elif char in ")]}":
                self._depth -= 1
        self._num_read = len(text)
        return None


def _unescaped(found: re.Match[str]) -> str:
    """What an escape of a string stands for. Raises ValueError, OverflowError, KeyError: no character."""
    kind, rest = found[0][1], found[0][2:]
    if kind in _SHORT:
        return _SHORT[kind]
    if kind in "xuU":
        return chr(int(rest, 16))
    if kind == "N":
        return unicodedata.lookup(rest[1:-1])
    return chr(int(found[0][1:], 8)) if kind in "01234567" else found[0]
