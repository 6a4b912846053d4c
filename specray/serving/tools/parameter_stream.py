"""Reads a call whose arguments are written one by one between tags, and tells them as JSON while they come.

An argument that the tool's schema calls a string is told as it is written; any other when it is complete,
since only then its type is known. What has been told cannot be taken back: a call that breaks off stays a
call, with the arguments so far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from enum import Enum, auto
from typing import Final

from specray.serving.tools.call_stream import MAX_HEAD_LEN, CallPart
from specray.serving.tools.formats import MAX_CALL_LEN, XML_FUNCTION, Schemas, parameter_of

_PARAMETER: Final = re.compile(r"\s{0,64}+<parameter=([^>\n]{1,256})>\n?")
_FUNCTION_END: Final = re.compile(r"\s{0,64}+</function>\s{0,64}+")
_VALUE_END: Final = "</parameter>"


class _Place(Enum):
    HEAD = auto()
    BETWEEN = auto()
    """Between two arguments."""
    TEXT = auto()
    """In an argument that is a string."""
    VALUE = auto()
    """In another argument."""
    REST = auto()
    """Behind the call."""
    LOST = auto()
    """In text that is no call."""


class ParameterStream:
    """The call of one region of an answer; used as ``CallStream``.

    Args:
        schemas: of the tools that the request has.
        allowed: names of the tools that may be called.
        limit: most calls to read; None: any number.

    Attributes:
        rest: text that is not part of a call that was told.
        num_calls: 1 if the call has begun.
    """

    def __init__(self, schemas: Schemas, allowed: Collection[str], limit: int | None) -> None:
        self.rest = ""
        self.num_calls = 0
        self._schemas = schemas
        self._allowed = allowed
        self._limit = limit
        self._place = _Place.HEAD
        self._name = ""
        self._schema: object = None
        """Schema of the argument that is written."""
        self._num_arguments = 0
        self._num_told = 0
        """Characters of the arguments."""

    @property
    def is_in_call(self) -> bool:
        """The call has begun and not ended, perhaps because it cannot."""
        return self.num_calls > 0 and self._place is not _Place.REST

    def push(self, text: str) -> Iterator[CallPart]:
        """Yields what more text brings."""
        self.rest += text
        steps = {
            _Place.HEAD: self._begin,
            _Place.BETWEEN: self._go_on,
            _Place.TEXT: self._tell_text,
            _Place.VALUE: self._tell_value,
        }
        while self.rest and self._place in steps:
            before = self._place, len(self.rest)
            told = steps[self._place]()
            if told:
                is_first, self._num_told = self._num_told == 0, self._num_told + len(told)
                yield CallPart(self._name, told, is_first, self._place is _Place.REST)
            if self._num_told > MAX_CALL_LEN:
                self._place = _Place.LOST
            if (self._place, len(self.rest)) == before:
                return

    def finish(self) -> Iterator[CallPart]:
        """Yields the end of a call whose arguments are complete, though its closing tag is missing."""
        if self._place is _Place.BETWEEN and not self.rest.strip():
            self._place, self.rest = _Place.REST, ""
            yield CallPart(self._name, "}", False, True)

    def _begin(self) -> str:
        if self._limit is not None and self._limit < 1:
            return ""
        found = XML_FUNCTION.match(self.rest)
        if found is None or found[1].strip() not in self._allowed:
            if found is not None or len(self.rest) > MAX_HEAD_LEN:
                self._place = _Place.LOST
            return ""
        self._name, self._place, self.num_calls = found[1].strip(), _Place.BETWEEN, 1
        self.rest = self.rest[found.end() :]
        return "{"

    def _go_on(self) -> str:
        """Reads on to an argument, or to the end of the call."""
        if end := _FUNCTION_END.match(self.rest):
            self._place, self.rest = _Place.REST, self.rest[end.end() :]
            return "}"
        found = _PARAMETER.match(self.rest)
        if found is None or found.end() == len(self.rest):
            # The line break behind the tag is no part of the argument.
            if len(self.rest) > MAX_HEAD_LEN:
                self._place = _Place.LOST
            return ""
        self.rest = self.rest[found.end() :]
        properties = self._schemas.get(self._name, {}).get("properties", {})
        self._schema = properties.get(found[1])
        is_text = isinstance(self._schema, dict) and self._schema.get("type") == "string"
        self._place = _Place.TEXT if is_text else _Place.VALUE
        self._num_arguments += 1
        comma = ", " if self._num_arguments > 1 else ""
        return f"{comma}{json.dumps(found[1], ensure_ascii=False)}: " + '"' * is_text

    def _tell_text(self) -> str:
        text, end, rest = self.rest.partition(_VALUE_END)
        if end:
            self._place, self.rest = _Place.BETWEEN, rest
            return _escaped(text.removesuffix("\n")) + '"'
        # The end of the text may be the beginning of the argument's end, with the line break before it.
        held = text.rfind("<", max(0, len(text) - len(_VALUE_END) + 1))
        told = text if held < 0 or not _VALUE_END.startswith(text[held:]) else text[:held]
        told = told.removesuffix("\n")
        self.rest = text[len(told) :]
        return _escaped(told)

    def _tell_value(self) -> str:
        text, end, rest = self.rest.partition(_VALUE_END)
        if not end:
            if len(text) > MAX_CALL_LEN:
                self._place = _Place.LOST
            return ""
        try:
            told = json.dumps(parameter_of(text, self._schema), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self._place = _Place.LOST
            return ""
        self._place, self.rest = _Place.BETWEEN, rest
        return told


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
