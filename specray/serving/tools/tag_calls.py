"""Reads calls whose arguments are written one by one between tags, and gives them as JSON.

An argument that the tool's schema calls a string is given as it is written; any other when it is complete,
since only then its type is known. A value may hold any text, tags of calls as well: a closing tag ends it
where another tag of the call follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import regex

from specray.serving.tools.parameter_value import ParameterSchema
from specray.serving.tools.reader import SPACE, CallPart, CallPlace, CallReader, Schemas

KEY: Final = r"(?P<key>[^<>\n]{1,256}+)"
"""Group of a parameter's name."""
_QUOTES: Final = "\"' "


@dataclass(frozen=True, slots=True)
class TagForm:
    """How a format writes such calls: regular expressions."""

    head: str
    """A call up to its arguments, with the group ``name``."""
    parameter: str
    """What begins an argument, with the group ``key``."""
    value_end: str
    """What ends it."""
    has_lines: bool
    """The value stands on lines of its own."""
    end: str
    """What ends the call."""
    closing: str
    """What ends all calls."""


class _Patterns:
    """The patterns of a form. Those that begin with a value's end match at its first character."""

    def __init__(self, form: TagForm) -> None:
        tags = f"{form.parameter}|{form.end}|{form.closing}"
        self.head = regex.compile(rf"{SPACE}{form.head}(?={SPACE}(?:{tags}))")
        self.parameter = regex.compile(rf"{SPACE}{form.parameter}(?=.)", regex.DOTALL)
        self.end = regex.compile(rf"{SPACE}(?:{form.end}|(?={form.closing}))")
        self.closing = regex.compile(rf"{SPACE}{form.closing}")
        self.again = regex.compile(rf"(?={SPACE}{form.head})")
        self.value_ends = tuple(self._value_end(form, tags + last) for last in ("", r"|\Z"))
        """What ends a value while more text may come, and at the end of the answer."""
        self.lines_ends = tuple(self._lines_end(form, tags + last, last) for last in ("", r"|\Z"))
        """The same for a value of lines."""

    def _value_end(self, form: TagForm, tags: str) -> regex.Pattern[str]:
        line_end = r"\n?" if form.has_lines else ""
        return regex.compile(rf"{line_end}{form.value_end}(?={SPACE}(?:{tags}))(?P<known>\b\B)?")

    def _lines_end(self, form: TagForm, tags: str, last: str) -> regex.Pattern[str]:
        # A model that writes the tag after the last line, or leaves it out, is understood where all that
        # follows is what has to follow; the former also where a parameter follows that the tool has.
        known = form.parameter.replace("<key>", "<known>")
        rest = rf"{SPACE}{form.end}{SPACE}{form.closing}{SPACE}(?:{form.head}{last})"
        return regex.compile(
            rf"\n{form.value_end}(?={SPACE}(?:{tags}))|{form.value_end}(?={SPACE}{known}|{rest})|\n(?={rest})"
        )


class TagCalls(CallReader):
    """Calls of a format whose arguments stand between tags.

    Args:
        form: of the format.
        schemas: of the tools that the request has.
        allowed: as for ``CallReader``.
    """

    def __init__(self, form: TagForm, schemas: Schemas, allowed: Collection[str]) -> None:
        super().__init__(allowed)
        self._has_lines = form.has_lines
        self._patterns = _patterns(form)
        self._schemas = schemas
        self._schema = ParameterSchema({}, "")
        """Schema of the argument that is being written."""
        self._num_arguments = 0
        self._is_lines = False
        """The value began with a line break, which is none of it."""
        self._is_first_line = False
        """The same, and the line break is not read."""
        self._num_searched = 0
        """Characters of ``rest`` in which the value does not end."""
        self._has_ended = False

    def finish(self) -> Iterator[CallPart]:
        self._has_ended, self._num_searched = True, 0
        if self.place in (CallPlace.TEXT, CallPlace.VALUE):
            yield from self._read()

    def _steps(self) -> Mapping[CallPlace, Callable[[], str]]:
        return {
            CallPlace.HEAD: self._begin_call,
            CallPlace.BETWEEN: self._read_tag,
            CallPlace.TEXT: self._tell_text,
            CallPlace.VALUE: self._tell_value,
            CallPlace.NEXT: self._find_next,
        }

    def _begin_call(self) -> str:
        if self._begin(self._patterns.head) is None:
            return ""
        self.place, self._num_arguments = CallPlace.BETWEEN, 0
        return "{"

    def _read_tag(self) -> str:
        end = self._patterns.end.match(self.rest, partial=True)
        if end is not None and not end.partial:
            self._take(end.end())
            self.place = CallPlace.NEXT
            return "}"
        found = self._patterns.parameter.match(self.rest, partial=True)
        if found is None or found.partial:
            if found is None and end is None:
                self.place = CallPlace.LOST
            return ""
        key = found["key"].strip(_QUOTES)
        self._take(found.end())
        self._schema = ParameterSchema(self._schemas.get(self._name, {}), key)
        self._is_lines = self._is_first_line = self._has_lines and self.rest.startswith("\n")
        self._num_searched = 0
        self._num_arguments += 1
        self.place = CallPlace.TEXT if self._schema.is_text else CallPlace.VALUE
        comma = ", " if self._num_arguments > 1 else ""
        return f"{comma}{_quoted(key)}: " + '"' * self._schema.is_text

    def _find_end(self) -> tuple[int, int | None]:
        """Where the value ends, and where its end does; None: what follows decides."""
        ends = self._patterns.lines_ends if self._is_lines else self._patterns.value_ends
        pattern = ends[self._has_ended]
        while found := pattern.search(self.rest, self._num_searched, partial=not self._has_ended):
            if found.partial or not found["known"] or self._schema.has_key(found["known"].strip(_QUOTES)):
                self._num_searched = found.start()
                return found.start(), None if found.partial else found.end()
            self._num_searched = found.start() + 1
        self._num_searched = len(self.rest)
        return len(self.rest), None

    def _tell_text(self) -> str:
        length, end = self._find_end()
        text = self._value(length)
        self._take(length if end is None else end)
        self._num_searched = 0
        if end is None:
            return _quoted(text)[1:-1]
        self.place = CallPlace.BETWEEN
        return _quoted(text)[1:]

    def _tell_value(self) -> str:
        length, end = self._find_end()
        text = self.rest[self._is_first_line : length]
        if end is None:
            if self._schema.is_nullable_text and not any(
                null.startswith(text.strip().lower()) for null in ("null", "none")
            ):
                self.place = CallPlace.TEXT
                return '"'
            return ""
        self._take(end)
        self.place = CallPlace.BETWEEN
        try:
            return self._schema.json(text)
        except (ValueError, RecursionError):
            return _quoted(text)

    def _value(self, length: int) -> str:
        text = self.rest[self._is_first_line and length > 0 : length]
        self._is_first_line = self._is_first_line and not length
        return text

    def _find_next(self) -> str:
        self._go_on(self._patterns.closing, self._patterns.again)
        return ""


@cache
def _patterns(form: TagForm) -> _Patterns:
    return _Patterns(form)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
