"""Looks into the sources of grammars: what never ends, and which texts are asked for.

llguidance knows the language of Lark grammars; here one is read after it has been compiled there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Final

from specray.grammar.endless import endless_cycle, endless_schema, objects_within
from specray.types import Grammar, GrammarKind

_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r]+|(?:\#|//)[^\n]*)
    |(?P<line>\n)
    |(?P<json>%(?:json|regex|llguidance)\b\s*)
    |(?P<inner>%lark\b)
    |(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>|@[\w-]+)
    |(?P<rule>!?[?_]?[a-z][_a-z0-9-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*)
    |(?P<optional>[?*]|[{~]\s*0?\s*(?:,|\.\.)\s*\d*\s*\}?)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)
"""What stands for itself in a regular expression, and an escaped character, which stays."""
_Token = tuple[str, str]


def endless_rule(grammar: Grammar) -> str | None:
    """Name of a rule, or path of a schema within, that never ends; None: there is none."""
    if grammar.kind is not GrammarKind.LARK:
        return None
    tokens = list(_tokens(grammar.source))
    for kind, value in tokens:
        if kind == "json" and (path := endless_schema(json.loads(value))) is not None:
            return path
    cycle = endless_cycle(_Rules(tokens).reached())
    return next((f"rule {part}" for part in cycle if isinstance(part, str)), None)


def texts(grammar: Grammar) -> Iterator[str]:
    """Texts of which a grammar asks: strings of Lark, and values and names of JSON as they are written."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        yield from _schema_texts(json.loads(grammar.source))
    elif grammar.kind is GrammarKind.LARK:
        for kind, value in _tokens(grammar.source):
            if kind == "json":
                yield from _schema_texts(json.loads(value))
            elif kind == "text" and value.startswith('"'):
                with suppress(ValueError):
                    yield json.loads(value.removesuffix("i"))


def named_tokens(grammar: Grammar) -> Iterator[str | range]:
    """Tokens that a Lark grammar asks for as such: their names, and ranges of their ids."""
    if grammar.kind is not GrammarKind.LARK:
        return
    for kind, value in _tokens(grammar.source):
        if kind != "text" or not value.startswith("<"):
            continue
        if not value.startswith("<["):
            yield value
            continue
        for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", value):
            yield range(int(first), int(last or first) + 1)


def slashed(expression: str) -> str:
    return _SLASH.sub(lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), expression)


def _schema_texts(schema: object) -> Iterator[str]:
    for node in objects_within(schema):
        enum, properties = node.get("enum"), node.get("properties")
        values = [
            *(enum if isinstance(enum, list) else ()),
            *([node["const"]] if "const" in node else ()),
        ]
        values += properties if isinstance(properties, dict) else ()
        yield from (json.dumps(value, ensure_ascii=False) for value in values)


def _tokens(source: str) -> Iterator[_Token]:
    decoder, place = json.JSONDecoder(), 0
    while place < len(source):
        match = _TOKEN.match(source, place)
        assert match is not None and match.lastgroup is not None
        kind, value, place = match.lastgroup, match[0], match.end()
        if kind == "json":
            try:
                _, end = decoder.raw_decode(source, place)
            except (ValueError, RecursionError):
                return
            is_schema = value.startswith("%json")
            kind, value, place = ("json" if is_schema else "text"), source[place:end], end
        if kind != "space":
            yield kind, value


class _Rules:
    """What each rule needs of others: rules by their names, groups and alternatives by numbers."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.needs: dict[Hashable, tuple[bool, list[Hashable]]] = {}
        self._mentioned: dict[Hashable, set[str]] = {}
        """Rules that each rule names, whether it needs them or not."""
        self._tokens = tokens
        self._place = 0
        while self._place < len(tokens):
            kind, value = self._next()
            if kind == "rule" and self._skip_to_colon():
                first, name = self._place, value.lstrip("!?")
                self.needs[name] = (False, self._alternatives())
                body = self._tokens[first : self._place]
                self._mentioned[name] = {value.lstrip("!?") for kind, value in body if kind == "rule"}

    def reached(self) -> dict[Hashable, tuple[bool, list[Hashable]]]:
        """``needs`` without rules that cannot be reached from the first one."""
        found, waiting = {"start"}, ["start"]
        while waiting:
            new = self._mentioned.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return {part: need for part, need in self.needs.items() if not isinstance(part, str) or part in found}

    def _next(self) -> _Token:
        self._place += 1
        return self._tokens[self._place - 1]

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ("line", "\n")

    def _skip_to_colon(self) -> bool:
        place = self._place
        while self._peek()[0] != "line":
            if self._next() == ("mark", ":") and self._peek() != ("mark", ":"):
                return True
        self._place = place
        return False

    def _alternatives(self) -> list[Hashable]:
        """Alternatives up to the end of the rule or the group."""
        found: list[Hashable] = []
        while True:
            key: Hashable = (len(self.needs),)
            self.needs[key] = (True, [])
            self.needs[key][1].extend(self._sequence())
            found.append(key)
            if self._peek() == ("line", "\n") and self._after_lines() == ("mark", "|"):
                while self._peek()[0] == "line":
                    self._next()
            if self._peek() != ("mark", "|"):
                return found
            self._next()

    def _after_lines(self) -> _Token:
        ahead = 0
        while self._peek(ahead)[0] == "line" and self._place + ahead < len(self._tokens):
            ahead += 1
        return self._peek(ahead)

    def _sequence(self) -> Iterator[Hashable]:
        while True:
            kind, value = self._peek()
            if kind == "line" or (kind == "mark" and value in "|)]"):
                return
            self._next()
            needed: Hashable | None = None
            if kind == "rule":
                needed = value.lstrip("!?")
            elif kind == "mark" and value in "([":
                needed = self._group()
            elif kind == "inner":
                self._skip_braces()
            if needed is not None and self._peek()[0] != "optional" and value != "[":
                yield needed

    def _group(self) -> Hashable:
        key: Hashable = (len(self.needs), "group")
        self.needs[key] = (False, [])
        self.needs[key][1].extend(self._alternatives())
        if self._peek()[0] == "mark":
            self._next()
        return key

    def _skip_braces(self) -> None:
        depth = 0
        while self._place < len(self._tokens):
            _, value = self._next()
            depth += (value == "{") - (value == "}")
            if depth == 0:
                return
