"""Reads a call whose arguments are written one by one between tags, and tells them as JSON while they come.

An argument that the tool's schema calls a string is told as it is written; any other when it is complete,
since only then its type is known. What has been told cannot be taken back: a call that breaks off stays a
call, with the arguments so far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from specray.serving.tools.call_stream import MAX_HEAD_LEN, CallPart, CallReader, Place
from specray.serving.tools.formats import MAX_CALL_LEN, XML_FUNCTION, Schemas, parameter_of

_PARAMETER: Final = re.compile(r"\s{0,64}+<parameter=([^>\n]{1,256})>\n?")
_FUNCTION_END: Final = re.compile(r"\s{0,64}+</function>\s{0,64}+")
_VALUE_END: Final = "</parameter>"


class ParameterStream(CallReader):
    """The call of one region of an answer.

    Args:
        schemas: of the tools that the request has.
        allowed: as for ``CallReader``.
        limit: the same.
    """

    def __init__(self, schemas: Schemas, allowed: Collection[str], limit: int | None) -> None:
        super().__init__(allowed, limit)
        self._schemas = schemas
        self._schema: object = None
        """Schema of the argument that is written."""
        self._num_arguments = 0

    def finish(self) -> Iterator[CallPart]:
        """Yields the end of a call whose arguments are complete, though its closing tag is missing."""
        if self.place is Place.BETWEEN and not self.rest.strip():
            self.place, self.rest = Place.END, ""
            yield CallPart(self._name, "}", False, True)

    def _steps(self) -> Mapping[Place, Callable[[], str]]:
        return {
            Place.HEAD: self._begin_call,
            Place.BETWEEN: self._go_on,
            Place.TEXT: self._tell_text,
            Place.VALUE: self._tell_value,
        }

    def _begin_call(self) -> str:
        if self._begin(XML_FUNCTION) is None:
            return ""
        self.place = Place.BETWEEN
        return "{"

    def _go_on(self) -> str:
        """Reads on to an argument, or to the end of the call."""
        if end := _FUNCTION_END.match(self.rest):
            self.place, self.rest = Place.END, self.rest[end.end() :]
            return "}"
        found = _PARAMETER.match(self.rest)
        if found is None or found.end() == len(self.rest):
            # The line break behind the tag is no part of the argument.
            if len(self.rest) > MAX_HEAD_LEN:
                self.place = Place.LOST
            return ""
        self.rest = self.rest[found.end() :]
        properties = self._schemas.get(self._name, {}).get("properties", {})
        self._schema = properties.get(found[1])
        is_text = isinstance(self._schema, dict) and self._schema.get("type") == "string"
        self.place = Place.TEXT if is_text else Place.VALUE
        self._num_arguments += 1
        comma = ", " if self._num_arguments > 1 else ""
        return f"{comma}{json.dumps(found[1], ensure_ascii=False)}: " + '"' * is_text

    def _tell_text(self) -> str:
        text, end, rest = self.rest.partition(_VALUE_END)
        if end:
            self.place, self.rest = Place.BETWEEN, rest
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
                self.place = Place.LOST
            return ""
        try:
            told = json.dumps(parameter_of(text, self._schema), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self.place = Place.LOST
            return ""
        self.place, self.rest = Place.BETWEEN, rest
        return told


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
