"""Reads calls whose arguments are JSON: objects with a name, or a name and then its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import regex

from specray.serving.tools.json_text import JsonText, object_of
from specray.serving.tools.reader import NAME, SPACE, CallPart, CallPlace, CallReader

_KEYS: Final = "name|arguments|parameters|function|type|id"
_NO_ARGUMENTS: Final = frozenset(_KEYS.split("|"))
"""Keys of a call's object; others may be its arguments."""
_FIRST_KEY: Final = regex.compile(rf"""\{{[ \t\r\n]{{0,64}}+["'](?:{_KEYS})["']""")
"""How the object of a call begins."""
_LEFT: Final = regex.compile(r"[\s,;\]}`]*+")
"""What is left after the last call of an answer without being text."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """How a format writes such calls. Patterns of what more text may change match nothing, or wait for it."""

    head: regex.Pattern[str]
    """A call up to its arguments. Its groups: ``name``; ``object``, what it has of an object that ends after
    the arguments; ``id``."""
    before: regex.Pattern[str] | None
    """What comes before the object of a call, where a call is one; None: it is none."""
    closing: regex.Pattern[str] | None
    """What ends all calls, from the end of a call's arguments or object on; None: nothing does."""
    again: regex.Pattern[str]
    """What ends one call, before the beginning of another, which is looked at alone."""
    tail: regex.Pattern[str]
    """What may be left after the last call without being text."""


def objects(opening: str, closing: str | None) -> JsonForm:
    """Objects with ``name`` and ``arguments`` (or ``parameters``), one after the other or in a list.

    Args:
        opening: regular expression of what begins calls.
        closing: of what ends them; None: nothing does.
    """
    # Templates that show the object in double brackets make models write them.
    before = rf"(?:{opening})?{SPACE}(?:```(?:json)?{SPACE})?[\s,;\[]{{0,64}}+(?:\{{{SPACE}(?=\{{))?+"
    head = (
        rf"""(?P<object>\{{{SPACE}["']name["']{SPACE}:{SPACE}["']{NAME}["']{SPACE},{SPACE}"""
        rf"""["'](?:arguments|parameters)["']{SPACE}:{SPACE})(?=\{{)"""
    )
    return JsonForm(
        head=regex.compile(before + head),
        before=regex.compile(before + r"(?=\{)"),
        closing=None if closing is None else regex.compile(rf"[\s\]}}`]{{0,64}}+{closing}"),
        again=regex.compile(rf"(?=(?:{SPACE}{opening})?[\s,;\[]{{0,64}}+\{{)"),
        tail=regex.compile(rf"{SPACE}\]"),
    )


def named(
    opening: str, head: str, *, begin: str = "", after: str = "", closing: str | None = None
) -> JsonForm:
    """A name, and then its arguments.

    Args:
        opening: regular expression of what begins calls.
        head: of a call from its name up to its arguments.
        begin: of what begins each call.
        after: of what may be left after the arguments.
        closing: of what ends calls; None: nothing does.
    """
    first = rf"{SPACE}(?:{opening}{SPACE})?{begin}{SPACE}{head}{SPACE}(?=\S)"
    return JsonForm(
        head=regex.compile(first),
        before=None,
        closing=None if closing is None else regex.compile(rf"{SPACE}{after}{SPACE}{closing}"),
        again=regex.compile(rf"{SPACE}{after}(?={first})"),
        tail=regex.compile(rf"{SPACE}{after}"),
    )


def either(first: JsonForm, second: JsonForm) -> JsonForm:
    """Calls of two forms, of which one needs no object of a call and one does."""

    def joined(*patterns: regex.Pattern[str] | None) -> regex.Pattern[str] | None:
        found = [f"(?:{pattern.pattern})" for pattern in patterns if pattern is not None]
        return regex.compile("|".join(found)) if found else None

    head, again = joined(first.head, second.head), joined(first.again, second.again)
    tail = joined(second.tail, first.tail)
    assert head is not None and again is not None and tail is not None
    return JsonForm(
        head, joined(first.before, second.before), joined(first.closing, second.closing), again, tail
    )


class JsonCalls(CallReader):
    """Calls of a format whose arguments are JSON.

    Args:
        form: of the format.
        allowed: as for ``CallReader``.
    """

    def __init__(self, form: JsonForm, allowed: Collection[str]) -> None:
        super().__init__(allowed)
        self._form = form
        self._json = JsonText()
        """The arguments, or the object of the call."""
        self._depth = 0
        """Brackets of the call's object around its arguments."""
        self._num_read = 0
        """Characters of ``rest`` that belong to an object that was read and not given yet."""
        self._object: list[str] = []

    def finish(self) -> Iterator[CallPart]:
        if self.place is CallPlace.VALUE:
            yield from self.push("\n")
        left = (_LEFT.fullmatch(self.rest), self._form.tail.fullmatch(self.rest.rstrip()))
        if self.place in (CallPlace.REST, CallPlace.NEXT) and any(left):
            self.rest = ""
        elif self.place is CallPlace.NEXT:
            # What might have been another call is none.
            self._end()

    def _steps(self) -> Mapping[CallPlace, Callable[[], str]]:
        return {
            CallPlace.HEAD: self._begin_call,
            CallPlace.ARGUMENTS: self._tell,
            CallPlace.VALUE: self._tell_value,
            CallPlace.REST: self._skip,
            CallPlace.NEXT: self._find_next,
        }

    def _begin_call(self) -> str:
        found = self._form.head.match(self.rest, partial=True)
        if found is not None and not found.partial:
            self._begin(self._form.head)
            self._json, self._num_read = JsonText(), 0
            self._json.push(found.groupdict().get("object") or "")
            self._depth = self._json.depth
            if self.place is not CallPlace.LOST:
                self.place = CallPlace.ARGUMENTS if self.rest.startswith("{") else CallPlace.VALUE
            return ""
        told = "" if self._form.before is None else self._read_object()
        if self.place is CallPlace.LOST or self._form.before is None:
            self.place = CallPlace.LOST if found is None else CallPlace.HEAD
        return told

    def _read_object(self) -> str:
        """Reads a call that is told whole: its arguments come first, are no object, or are missing."""
        assert self._form.before is not None
        start = self._form.before.match(self.rest, partial=True)
        if start is not None and start.partial:
            return ""
        first = None if start is None else _FIRST_KEY.match(self.rest, start.end(), partial=True)
        if start is None or first is None:
            self.place = CallPlace.LOST
            return ""
        if first.partial:
            return ""
        if not self._num_read:
            self._json, self._num_read = JsonText(), start.end()
            self._object.clear()
        length, told = self._json.push(self.rest[self._num_read :])
        self._num_read += length
        self._object.append(told)
        if self._json.is_broken:
            self.place = CallPlace.LOST
        if not self._json.is_whole:
            return ""
        try:
            self._name, arguments = _call_of(json.loads("".join(self._object)))
        except (ValueError, RecursionError):
            self._name = ""
        if self._name not in self._allowed:
            self.place = CallPlace.LOST
            return ""
        self._raw.clear()
        self._call_id = ""
        self._take(self._num_read)
        self._num_read, self.place = 0, CallPlace.NEXT
        return arguments

    def _tell(self) -> str:
        length, told = self._json.push(self.rest, down_to=self._depth)
        self._take(length)
        if self._json.is_broken:
            self.place = CallPlace.LOST
        elif self._json.depth == self._depth:
            self.place = CallPlace.REST if self._depth else CallPlace.NEXT
        return told

    def _tell_value(self) -> str:
        """Reads arguments that are written as text, or are none."""
        length, told = self._json.push(self.rest)
        if self._json.is_whole:
            try:
                arguments = object_of(json.loads(told))
            except ValueError:
                self.place = CallPlace.LOST
                return ""
            self._take(length)
            self.place = CallPlace.NEXT
            return arguments
        is_broken, self._json = self._json.is_broken, JsonText()
        if not is_broken:
            return ""
        # There are no arguments where what follows them follows the name.
        follows = [
            pattern.match(self.rest, partial=True)
            for pattern in (self._form.closing, self._form.again)
            if pattern is not None
        ]
        if any(found is not None and not found.partial for found in follows):
            self.place = CallPlace.NEXT
            return "{}"
        if not any(follows):
            self.place = CallPlace.LOST
        return ""

    def _skip(self) -> str:
        length, _ = self._json.push(self.rest)
        self._take(length)
        if self._json.is_broken or self._json.is_whole:
            self.place = CallPlace.NEXT
        return ""

    def _find_next(self) -> str:
        length = len(self.rest)
        self._go_on(self._form.closing, self._form.again)
        if self.place is CallPlace.END and len(self.rest) == length:
            self._end()
        return ""

    def _end(self) -> None:
        """Ends calls without the marker that ends them: what it would have followed is left."""
        self.place = CallPlace.END
        left = self._form.tail.match(self.rest)
        if left is not None and left[0].strip():
            self._take(left.end())


def _call_of(value: object) -> tuple[str, str]:
    """Name and arguments of a call's object. Raises ValueError: it is none."""
    function = value.get("function") if isinstance(value, dict) else None
    value = function if isinstance(function, dict) else value
    name = value.get("name", function) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and not value.keys() <= _NO_ARGUMENTS:
        raise ValueError("the arguments of a call have no name")
    return name, object_of(arguments)
