"""Follows JSON text that comes in pieces, and says where it ends or stops being JSON."""

from __future__ import annotations

from typing import Final

_SPACE: Final = " \t\r\n"
_ESCAPED: Final = '"\\/bfnrt'
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER: Final[dict[tuple[str, str], str]] = {
    ("minus", "0"): "zero",
    ("minus", "1"): "integer",
    ("zero", "."): "point",
    ("zero", "e"): "exponent",
    ("integer", "1"): "integer",
    ("integer", "0"): "integer",
    ("integer", "."): "point",
    ("integer", "e"): "exponent",
    ("point", "0"): "fraction",
    ("point", "1"): "fraction",
    ("fraction", "0"): "fraction",
    ("fraction", "1"): "fraction",
    ("fraction", "e"): "exponent",
    ("exponent", "+"): "sign",
    ("exponent", "-"): "sign",
    ("exponent", "0"): "power",
    ("exponent", "1"): "power",
    ("sign", "0"): "power",
    ("sign", "1"): "power",
    ("power", "0"): "power",
    ("power", "1"): "power",
}
"""What follows a part of a number; 1 stands for all digits but 0, and e for E."""
_WHOLE_NUMBERS: Final = ("zero", "integer", "fraction", "power")
"""Parts with which a number may end."""


class JsonPrefix:
    """One JSON text, as far as it has come.

    Attributes:
        is_whole: the value is complete; only whitespace may follow.
        is_broken: what came is no JSON, and nothing that follows can mend it.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.is_broken = False
        self._open: list[str] = []
        """Brackets that are open."""
        self._state = "value"
        self._rest = ""
        """What the literal still lacks; of an escape, one character for each digit."""
        self._is_key = False

    @property
    def depth(self) -> int:
        """Brackets that are open."""
        return len(self._open)

    def push(self, text: str, *, down_to: int = 0) -> int:
        """Reads on, up to the end of the text, to what is no JSON, or to the bracket that ends a value.

        Args:
            down_to: brackets that are still open behind the value.

        Returns:
            How many characters were read.
        """
        for place, char in enumerate(text):
            if self.is_whole or self.is_broken:
                return place
            self._read(char)
            if self.is_broken:
                return place
            if char in "}]" and self._state == "more" and len(self._open) == down_to:
                return place + 1
        return len(text)

    def _read(self, char: str) -> None:
        if self._state == "string":
            self._read_string(char)
        elif self._state in ("escape", "unicode"):
            self._read_escape(char)
        elif self._state == "literal":
            self.is_broken = char != self._rest[0]
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
        elif self._state in _NUMBER_STATES:
            self._read_number(char)
        elif char not in _SPACE:
            self._read_structure(char)

    def _read_string(self, char: str) -> None:
        if char == '"':
            if self._is_key:
                self._is_key, self._state = False, "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._state = "escape"
        elif char < " ":
            self.is_broken = True

    def _read_escape(self, char: str) -> None:
        if self._state == "unicode":
            self.is_broken = char not in "0123456789abcdefABCDEF"
            self._rest = self._rest[1:]
            self._state = "unicode" if self._rest else "string"
        elif char == "u":
            self._state, self._rest = "unicode", "0000"
        else:
            self.is_broken = char not in _ESCAPED
            self._state = "string"

    def _read_number(self, char: str) -> None:
        kind = "1" if char in "123456789" else "e" if char == "E" else char
        following = _NUMBER.get((self._state, kind))
        if following is not None:
            self._state = following
        elif self._state in _WHOLE_NUMBERS:
            # The number ended before this character. One that is the whole text has no end of its own.
            self._end_value()
            if not self.is_whole and char not in _SPACE:
                self._read_structure(char)
        else:
            self.is_broken = True

    def _read_structure(self, char: str) -> None:
        """A character between strings, numbers and literals."""
        state = self._state
        if char in "}]" and self._closes(char):
            self._open.pop()
            self._end_value()
        elif state in ("key", "key or end"):
            self._is_key, self._state = True, "string"
            self.is_broken = char != '"'
        elif state == "colon":
            self._state = "value"
            self.is_broken = char != ":"
        elif state == "more":
            self._state = "key" if self._open[-1] == "{" else "value"
            self.is_broken = char != ","
        else:
            self._begin_value(char)

    def _closes(self, char: str) -> bool:
        is_object = char == "}"
        may_end = self._state in ("more", "key or end" if is_object else "value or end")
        return may_end and self._open[-1] == ("{" if is_object else "[")

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            self._open.append(char)
            self._state = "key or end" if char == "{" else "value or end"
        elif char == '"':
            self._state = "string"
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char]
        elif char in "-0123456789":
            self._state = {"-": "minus", "0": "zero"}.get(char, "integer")
        else:
            self.is_broken = True

    def _end_value(self) -> None:
        self._state = "more"
        self.is_whole = not self._open


_NUMBER_STATES: Final = frozenset(state for state, _ in _NUMBER)
