"""Reads JSON as models write it, in pieces of any size, and gives it as JSON: the reader of arguments.

What models write is not always JSON: raw line breaks in strings, quotes and literals of Python, a comma
before a closing bracket, a backslash that escapes nothing. All of that has one meaning, and is given as
JSON. All else is given letter for letter.
"""

from __future__ import annotations

import json
from typing import Final

import regex

MAX_GAP_LEN: Final = 1024
"""Characters of whitespace after a comma, and of a number."""
_SPACE: Final = regex.compile(r"[ \t\r\n]++")
_CHUNK: Final = {quote: regex.compile(rf'[^"\\\x00-\x1f{quote}]++') for quote in "'\""}
"""Characters of a string that stand for themselves, by its quote."""
_WORD: Final = regex.compile(r"[\w.+-]++")
_NUMBER: Final = regex.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_LITERALS: Final = {
    **{name: name for name in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
}
_COMMA: Final = regex.compile(r",[ \t\r\n]*+(?=.)", regex.DOTALL)
_HEX: Final = regex.compile(r"\\u[0-9a-fA-F]{0,4}")


class JsonText:
    """One value, as far as it has come.

    Attributes:
        is_whole: the value is complete.
        is_broken: what came has no meaning, and nothing that follows can mend it.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.is_broken = False
        self._open: list[str] = []
        """Brackets that are open."""
        self._state = "value"
        self._quote = ""
        """Quote of the string that is open; empty: none is."""
        self._told: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, text: str, *, down_to: int = 0) -> tuple[int, str]:
        """Reads on: to what more text decides, what has no meaning, or the bracket that ends a value.

        Args:
            text: what is not read yet, from the first character on.
            down_to: brackets that are still open after the value.

        Returns:
            The characters read, and their JSON.
        """
        place = 0
        while place < len(text) and not self.is_whole:
            length = self._read_string(text, place) if self._quote else self._read(text, place)
            if not length:
                break
            place += length
            if text[place - 1] in "}]" and not self._quote and len(self._open) == down_to:
                break
        told, self._told = "".join(self._told), []
        return place, told

    def _tell(self, text: str, length: int | None = None) -> int:
        self._told.append(text)
        return len(text) if length is None else length

    def _break(self) -> int:
        self.is_broken = True
        return 0

    def _read_string(self, text: str, place: int) -> int:
        """Returns the characters read; 0: the next ones decide, as everywhere here."""
        if chunk := _CHUNK[self._quote].match(text, place):
            return self._tell(chunk[0])
        char = text[place]
        if char == self._quote:
            self._quote = ""
            if self._state == "key":
                self._state = "colon"
            else:
                self._end_value()
            return self._tell('"', 1)
        if char == "\\":
            return self._read_escape(text, place)
        return self._tell(json.dumps(char)[1:-1], 1)

    def _read_escape(self, text: str, place: int) -> int:
        escaped = text[place + 1 : place + 2]
        if escaped == "u":
            found = _HEX.match(text, place)
            assert found is not None, "it begins with the escape"
            if len(found[0]) == 6:
                return self._tell(found[0])
            return 0 if found.end() == len(text) else self._tell("\\\\", 1)
        if escaped == "'":
            return self._tell("'", 2)
        if not escaped:
            return 0
        return self._tell("\\" + escaped) if escaped in '"\\/bfnrt' else self._tell("\\\\", 1)

    def _read(self, text: str, place: int) -> int:
        if space := _SPACE.match(text, place):
            return self._tell(space[0])
        char = text[place]
        if char in "}]":
            return self._close(char)
        if self._state == "more":
            return self._read_comma(text, place)
        if self._state == "colon":
            self._state = "value"
            return self._tell(char) if char == ":" else self._break()
        if char in "'\"":
            self._quote = char
            return self._tell('"', 1)
        if self._state == "key":
            return self._break()
        if char in "{[":
            self._open.append(char)
            self._state = "key" if char == "{" else "item"
            return self._tell(char)
        return self._read_word(text, place)

    def _close(self, char: str) -> int:
        opening, empty = ("{", "key") if char == "}" else ("[", "item")
        if self._state not in (empty, "more") or self._open[-1:] != [opening]:
            return self._break()
        self._open.pop()
        self._end_value()
        return self._tell(char)

    def _read_comma(self, text: str, place: int) -> int:
        found = _COMMA.match(text, place)
        gap = found.end() - place if found else len(text) - place
        if text[place] != "," or gap > MAX_GAP_LEN:
            return self._break()
        if found is None:
            return 0
        is_object = self._open[-1] == "{"
        if text[found.end()] == ("}" if is_object else "]"):
            return self._tell(found[0][1:], len(found[0]))
        self._state = "key" if is_object else "value"
        return self._tell(found[0])

    def _read_word(self, text: str, place: int) -> int:
        word = _WORD.match(text, place)
        if word is None or len(word[0]) > MAX_GAP_LEN:
            return self._break()
        if word.end() == len(text):
            return 0
        told = _LITERALS.get(word[0]) or (word[0] if _NUMBER.fullmatch(word[0]) else None)
        if told is None:
            return self._break()
        self._end_value()
        return self._tell(told, len(word[0]))

    def _end_value(self) -> None:
        self._state = "more"
        self.is_whole = not self._open


def loads(text: str) -> object:
    """The value of a whole text. Raises ValueError, RecursionError."""
    reader = JsonText()
    length, told = reader.push(text + "\n")
    if not reader.is_whole or text[length:].strip():
        raise ValueError("not one JSON value")
    return json.loads(told)


def json_of(value: object) -> str:
    """The JSON text of a value, in characters of UTF-8. Raises ValueError, TypeError, RecursionError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair can be written in JSON, but not in UTF-8.
    return text if _is_utf8(text) else json.dumps(value)


def object_of(value: object) -> str:
    """The JSON text of a call's arguments: an object, the text of one, or nothing. Raises ValueError."""
    try:
        while isinstance(value, str):
            value = loads(value) if value.strip() else None
        if value is None:
            return "{}"
        if isinstance(value, dict):
            return json_of(value)
    except (TypeError, RecursionError) as error:
        raise ValueError("the arguments of a call cannot be written") from error
    raise ValueError("the arguments of a call are no object")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
