"""Reads calls that are written as Python, and tells their keyword arguments as JSON while they come.

A string is told as it is written; any other argument when it is complete. What has been told cannot be taken
back: a call that breaks off stays a call, with the arguments so far. An answer that is no stream is read
here, too, so that both have the same calls; there a call that breaks off is content.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from specray.serving.tools.call_stream import MAX_HEAD_LEN, CallPart, CallReader, Place
from specray.serving.tools.formats import MAX_CALL_LEN, ToolCall, json_of
from specray.serving.tools.python_value import ValueEnd, opening_quote, read_value

_SPACE: Final = r"\s{0,64}+"
_NAME: Final = rf"(?P<name>[^\W\d][\w.]{{0,63}}+){_SPACE}\((?={_SPACE}(?:\)|#|[^\W\d]\w{{0,255}}+{_SPACE}=))"
_FIRST_HEAD: Final = re.compile(rf"{_SPACE}{_NAME}")
_HEAD: Final = re.compile(rf"{_SPACE},{_SPACE}{_NAME}")
_LIST_END: Final = re.compile(rf"{_SPACE}(?:,{_SPACE})?\]")
_GAP: Final = re.compile(r"(?:\s++|#[^\n]{0,500}+\n)++")
"""Space and comments, between the parts of a call."""
_KEY: Final = re.compile(rf"(?P<key>[^\W\d]\w{{0,255}}+){_SPACE}=(?!=){_SPACE}(?=\S)")
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
_PIECE_LEN: Final = 4096
"""Characters of a whole text that are read at a time: each step copies what is left of them."""
_SHORT: Final = {
    "\n": "",
    **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)),
    **{char: char for char in "\\'\""},
}


class PythonStream(CallReader):
    """The calls of one region of an answer.

    Args:
        allowed: as for ``CallReader``.
        limit: calls that are told; others are read and dropped. None: all.

    Attributes:
        call_start: characters of the region before the last call that has begun.
    """

    def __init__(self, allowed: Collection[str], limit: int | None) -> None:
        super().__init__(allowed, None)
        self.call_start = 0
        self._most = limit
        self._num_pushed = 0
        self._keys: set[str] = set()
        """Arguments of the call so far."""
        self._has_comma = False
        """The last argument has a comma behind it."""
        self._quote = ""
        """Quote of the string that is written; empty: the next may follow, and is joined to it."""
        self._value = ValueEnd()

    def push(self, text: str) -> Iterator[CallPart]:
        self._num_pushed += len(text)
        for part in super().push(text):
            if self._most is None or self.num_calls <= self._most:
                yield part

    def _steps(self) -> Mapping[Place, Callable[[], str]]:
        return {
            Place.HEAD: self._begin_call,
            Place.BETWEEN: self._go_on,
            Place.TEXT: self._tell_text,
            Place.VALUE: self._tell_value,
        }

    def _begin_call(self) -> str:
        if self.num_calls and (end := _LIST_END.match(self.rest)):
            self.place, self.rest = Place.END, self.rest[end.end() :]
            return ""
        start = self._num_pushed - len(self.rest)
        if self._begin(_HEAD if self.num_calls else _FIRST_HEAD) is None:
            return ""
        self.call_start, self.place = start, Place.BETWEEN
        self._keys, self._has_comma = set(), False
        return "{"

    def _go_on(self) -> str:
        """Reads on to an argument, or to the end of the call."""
        self._skip_gap()
        if self.rest.startswith(")"):
            self.place, self.rest = Place.HEAD, self.rest[1:]
            return "}"
        if self.rest.startswith(",") and self._keys and not self._has_comma:
            self._has_comma, self.rest = True, self.rest[1:]
            return ""
        found = _KEY.match(self.rest)
        if found is None:
            if len(self.rest) > MAX_HEAD_LEN:
                self.place = Place.LOST
            return ""
        quote = opening_quote(self.rest, found.end())
        if quote is None:
            return ""
        key = found["key"]
        if key in self._keys or self._has_comma != bool(self._keys):
            self.place = Place.LOST
            return ""
        self.rest = self.rest[found.end() + len(quote) :]
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._quote, self._has_comma, self._value = quote, False, ValueEnd()
        self.place = Place.TEXT if quote else Place.VALUE
        return f"{comma}{json_of(key)}: " + '"' * bool(quote)

    def _tell_text(self) -> str:
        if not self._quote:
            return self._join()
        found = _TEXTS[self._quote].match(self.rest)
        assert found is not None, "the pattern matches an empty text"
        told, length = _json_text(found[0])
        self.rest = self.rest[length:]
        if length < found.end():
            self.place = Place.LOST
        elif self.rest.startswith(self._quote):
            self.rest, self._quote = self.rest[len(self._quote) :], ""
        elif self.rest.startswith("\n") or len(self.rest) > _LONGEST_ESCAPE:
            self.place = Place.LOST
        return told

    def _join(self) -> str:
        """Reads on from the end of a string to the next one, or to the end of the argument."""
        self._skip_gap()
        if not self.rest:
            return ""
        if self.rest[0] in ",)":
            self.place = Place.BETWEEN
            return '"'
        quote = opening_quote(self.rest, 0)
        if quote:
            self._quote, self.rest = quote, self.rest[len(quote) :]
        elif (quote is not None and self.rest[0] != "#") or len(self.rest) > MAX_HEAD_LEN:
            self.place = Place.LOST
        return ""

    def _skip_gap(self) -> None:
        if gap := _GAP.match(self.rest):
            self.rest = self.rest[gap.end() :]

    def _tell_value(self) -> str:
        end = self._value.find(self.rest)
        if end is None or end > MAX_CALL_LEN:
            if len(self.rest) > MAX_CALL_LEN:
                self.place = Place.LOST
            return ""
        try:
            told = json_of(read_value(self.rest[:end]))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            self.place = Place.LOST
            return ""
        self.place, self.rest = Place.BETWEEN, self.rest[end:]
        return told


def read_python_calls(text: str, allowed: Collection[str], limit: int | None) -> tuple[list[ToolCall], str]:
    """The complete calls of a region, and the text behind them: that of a call that breaks off, if one does.

    Args:
        allowed: as for ``CallReader``.
        limit: as for ``PythonStream``.
    """
    stream, calls, is_open = PythonStream(allowed, limit), list[ToolCall](), False
    arguments = list[str]()
    pieces = (text[start : start + _PIECE_LEN] for start in range(0, len(text), _PIECE_LEN))
    for part in (part for piece in pieces for part in stream.push(piece)):
        if part.is_first:
            arguments.clear()
        arguments.append(part.arguments)
        if part.is_last:
            calls.append(ToolCall(part.name, "".join(arguments)))
        is_open = not part.is_last
    return calls, text[stream.call_start :] if is_open else stream.rest


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
