"""Reads calls that are written as Python, and gives their keyword arguments as JSON.

A string is given as it is written; any other argument when it is complete.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Final

import regex

from specray.serving.tools.json_text import json_of
from specray.serving.tools.python_value import ValueEnd, opening_quote, read_value
from specray.serving.tools.reader import MAX_CALL_LEN, MAX_HEAD_LEN, SPACE, CallPlace, CallReader

_CALL: Final = rf"(?P<name>[^\W\d][\w.]{{0,255}}+){SPACE}\((?={SPACE}(?:\)|#|[^\W\d]\w{{0,255}}+{SPACE}=))"
_FIRST_HEAD: Final = regex.compile(rf"\[{SPACE}{_CALL}")
_HEAD: Final = regex.compile(rf"{SPACE},{SPACE}{_CALL}")
_AGAIN: Final = regex.compile(rf"(?={_HEAD.pattern})")
_LIST_END: Final = regex.compile(rf"{SPACE}(?:,{SPACE})?\]")
_GAP: Final = re.compile(r"(?:\s++|#[^\n]{0,500}+\n)++")
"""Space and comments, between the parts of a call."""
_KEY: Final = re.compile(rf"(?P<key>[^\W\d]\w{{0,255}}+){SPACE}=(?!=){SPACE}(?=\S)")
_ESCAPE: Final = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}\n]{1,100}\}|[^xuUN0-7]"
_WHOLE_ESCAPE: Final = rf"{_ESCAPE}|[0-7]{{3}}|[0-7]{{1,2}}(?![0-7]|\Z))"
"""An escape of a string that no more text changes."""
_ESCAPES: Final = re.compile(rf"{_ESCAPE}|[0-7]{{1,3}})", re.DOTALL)
_LONGEST_ESCAPE: Final = 104
_TEXTS: Final = {
    **{quote: re.compile(rf"(?:[^\\\n{quote}]++|{_WHOLE_ESCAPE})*+", re.DOTALL) for quote in "'\""},
    **{
        3 * quote: re.compile(
            rf"(?:[^\\{quote}]++|{quote}{{1,2}}(?!{quote}|\Z)|{_WHOLE_ESCAPE})*+", re.DOTALL
        )
        for quote in "'\""
    },
}
"""What a string holds, up to its end or to what is no part of one yet, by its quote."""
_SHORT: Final = {
    "\n": "",
    **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)),
    **{char: char for char in "\\'\""},
}


class PythonCalls(CallReader):
    def __init__(self, allowed: Collection[str]) -> None:
        super().__init__(allowed)
        self._keys: set[str] = set()
        """Arguments of the call so far."""
        self._has_comma = False
        """A comma follows the last argument."""
        self._quote = ""
        """Quote of the string that is written; empty: the next may follow, and is joined to it."""
        self._value = ValueEnd()

    def _steps(self) -> Mapping[CallPlace, Callable[[], str]]:
        return {
            CallPlace.HEAD: self._begin_call,
            CallPlace.BETWEEN: self._read_argument,
            CallPlace.TEXT: self._tell_text,
            CallPlace.VALUE: self._tell_value,
            CallPlace.NEXT: self._find_next,
        }

    def _begin_call(self) -> str:
        if self._begin(_HEAD if self.num_calls else _FIRST_HEAD) is None:
            return ""
        self.place = CallPlace.BETWEEN
        self._keys, self._has_comma = set(), False
        return "{"

    def _find_next(self) -> str:
        self._go_on(_LIST_END, _AGAIN)
        return ""

    def _read_argument(self) -> str:
        self._skip_gap()
        if self.rest.startswith(")"):
            self.place = CallPlace.NEXT
            self._take(1)
            return "}"
        if self.rest.startswith(",") and self._keys and not self._has_comma:
            self._has_comma = True
            self._take(1)
            return ""
        found = _KEY.match(self.rest)
        if found is None:
            if len(self.rest) > MAX_HEAD_LEN:
                self.place = CallPlace.LOST
            return ""
        quote = opening_quote(self.rest, found.end())
        if quote is None:
            return ""
        key = found["key"]
        if key in self._keys or self._has_comma != bool(self._keys):
            self.place = CallPlace.LOST
            return ""
        self._take(found.end() + len(quote))
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._quote, self._has_comma, self._value = quote, False, ValueEnd()
        self.place = CallPlace.TEXT if quote else CallPlace.VALUE
        return f"{comma}{json_of(key)}: " + '"' * bool(quote)

    def _tell_text(self) -> str:
        if not self._quote:
            return self._join()
        found = _TEXTS[self._quote].match(self.rest)
        assert found is not None, "the pattern matches an empty text"
        told, length = _json_text(found[0])
        self._take(length)
        if length < found.end():
            self.place = CallPlace.LOST
        elif self.rest.startswith(self._quote):
            self._take(len(self._quote))
            self._quote = ""
        elif self.rest.startswith("\n") or len(self.rest) > _LONGEST_ESCAPE:
            self.place = CallPlace.LOST
        return told

    def _join(self) -> str:
        """Reads on from the end of a string to the next one, or to the end of the argument."""
        self._skip_gap()
        if not self.rest:
            return ""
        if self.rest[0] in ",)":
            self.place = CallPlace.BETWEEN
            return '"'
        quote = opening_quote(self.rest, 0)
        if quote:
            self._quote = quote
            self._take(len(quote))
        elif (quote is not None and self.rest[0] != "#") or len(self.rest) > MAX_HEAD_LEN:
            self.place = CallPlace.LOST
        return ""

    def _skip_gap(self) -> None:
        if gap := _GAP.match(self.rest):
            self._take(gap.end())

    def _tell_value(self) -> str:
        end = self._value.find(self.rest)
        if end is None or end > MAX_CALL_LEN:
            if len(self.rest) > MAX_CALL_LEN:
                self.place = CallPlace.LOST
            return ""
        try:
            told = json_of(read_value(self.rest[:end]))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            self.place = CallPlace.LOST
            return ""
        self.place = CallPlace.BETWEEN
        self._take(end)
        return told


def _json_text(text: str) -> tuple[str, int]:
    """A string's text as JSON has it, and how much of it was read: all, or up to what is no character."""
    told, start = list[str](), 0
    for found in _ESCAPES.finditer(text):
        told.append(json_of(text[start : found.start()])[1:-1])
        start = found.start()
        try:
            told.append(json_of(_unescaped(found[0]))[1:-1])
        except (ValueError, OverflowError, KeyError):
            return "".join(told), start
        start = found.end()
    return "".join((*told, json_of(text[start:])[1:-1])), len(text)


def _unescaped(escape: str) -> str:
    """What an escape of a string stands for. Raises ValueError, OverflowError, KeyError: no character."""
    kind, rest = escape[1], escape[2:]
    if kind in _SHORT:
        return _SHORT[kind]
    if kind in "xuU":
        return chr(int(rest, 16))
    if kind == "N":
        return unicodedata.lookup(rest[1:-1])
    return chr(int(escape[1:], 8)) if kind in "01234567" else escape
