"""Literals of Python in text that comes in pieces: where they end, and what they stand for."""

from __future__ import annotations

import ast
from typing import Final

_QUOTES: Final = "'\""
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}
"""Literals of JSON that models write amid Python."""


class ValueEnd:
    """Finds where a literal ends that comes in pieces."""

    def __init__(self) -> None:
        self._num_read = 0
        self._depth = 0
        """Brackets that are open."""
        self._closing = ""
        """What ends the string or the comment that is open; empty: none is."""

    def find(self, text: str) -> int | None:
        """Returns where the literal ends with which ``text`` begins, or None. It is longer at each call."""
        while self._num_read < len(text):
            place, char = self._num_read, text[self._num_read]
            length: int | None = 1
            if self._closing:
                length = self._read_inside(text, place)
            elif char in _QUOTES:
                quote = opening_quote(text, place)
                length, self._closing = None if quote is None else len(quote), quote or ""
            elif char == "#":
                self._closing = "\n"
            elif char in "([{":
                self._depth += 1
            elif not self._depth and char in ",)]}":
                return place
            elif char in ")]}":
                self._depth -= 1
            if length is None:
                return None
            self._num_read += length
        return None

    def _read_inside(self, text: str, place: int) -> int | None:
        """Returns how much of a string or comment is read; None: the next characters decide."""
        if text[place] == "\\" and self._closing != "\n":
            return 2 if place + 2 <= len(text) else None
        if text.startswith(self._closing, place):
            length, self._closing = len(self._closing), ""
            return length
        return None if self._closing.startswith(text[place : place + 3]) else 1


def opening_quote(text: str, start: int) -> str | None:
    char = text[start : start + 1]
    if not char or char not in _QUOTES:
        return ""
    run = text[start : start + 3]
    if run == 3 * char:
        return run
    return None if run == char * len(run) else char


def read_value(text: str) -> object:
    """What a literal stands for. Raises ValueError, TypeError, SyntaxError, MemoryError, RecursionError."""
    # Within brackets a literal may have several lines and a comment.
    tree = ast.parse(f"[{text}\n]", mode="eval")
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [_constant(entry) for entry in value]
            else:
                setattr(node, name, _constant(value))
    values = ast.literal_eval(tree)
    if len(values) != 1:
        raise ValueError("not one literal")
    return values[0]


def _constant(node: object) -> object:
    """A node of a literal, where it is a name of JSON what that stands for."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return ast.Constant(_JSON_NAMES[node.id])
    return node
