"""Grammar of a tool's arguments in a format that writes them one by one between tags.

A string stands there as it is, without quotes, so its bounds (``maxLength``, ``pattern``, ...) become one
regular expression. Any other value is JSON. What of a schema cannot be said in this way is refused for a
strict tool, and left out for any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from specray.errors import InvalidRequestError
from specray.grammar import lark_refusal, resolve, slashed
from specray.serving.tools.formats import ToolFormat
from specray.serving.tools.request import Tool

Schema = Mapping[str, Any]
_KEY: Final = re.compile(r"[^<>\n]{1,256}")
_ANY_KEY: Final = r'/[^<>"\n]{1,64}/'
_FREE: Final = r"(.|\n)*"
_MAX_REFERENCES: Final = 32
_MAX_DEPTH: Final = 8
"""Alternatives within each other that are looked into."""
_DATE: Final = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOUR})"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "email": rf"[a-zA-Z0-9_+-]+(?:\.[a-zA-Z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Regular expressions by format; all that they match is of the format."""
_SCALARS: Final = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(?:0|[1-9][0-9]{0,17})/",
    "number": r"/-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?/",
}
"""Values without quotes, by type."""
_BOUNDS: Final = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_CHOICES: Final = ("anyOf", "oneOf")


class ParameterRules:
    """The rules of one tool's arguments.

    Args:
        index: number of the tool, for the names of its rules.
        tool: its schema can be enforced as JSON.
        tool_format: says what stands around names and values.
        write: makes Lark of a text, with tokens in the place of markers.

    Raises:
        InvalidRequestError: the tool is strict, and a keyword cannot be enforced in this format.
    """

    def __init__(self, index: int, tool: Tool, tool_format: ToolFormat, write: Callable[[str], str]) -> None:
        self._field = tool.field
        self._end = write(tool_format.after_value)
        self._has_end_token = self._end != json.dumps(tool_format.after_value)
        self._closing = _literal(tool_format.after_value)
        self._not_end = f"~/{_FREE}{_literal(tool_format.after_value.rstrip(chr(10)))}{_FREE}/"
        """The first closing tag ends a value."""
        self._is_strict = tool.is_strict
        self._root = dict(tool.parameters)
        self.rules: list[str] = []
        self.names: list[str] = []
        """The rules of all arguments in their order, as the rule of a call has them."""
        whole = self._followed(self._root)
        required = set(whole.get("required", ()))
        properties = self._properties(whole, required)
        for place, (key, schema) in enumerate(properties.items()):
            if _KEY.fullmatch(key):
                name = f"{index}_{place}"
                self._add(name, write(f"{tool_format.before_key}{key}{tool_format.after_key}"), key, schema)
                self.names.append(f"arg_{name}" + ("" if key in required else "?"))
            else:
                self._refuse(key[:60], "a name with <, > or a line break, or longer than 256 characters")
        others = whole.get("additionalProperties", False)
        if not properties and others is not False:
            head = f"{write(tool_format.before_key)} {_ANY_KEY} {write(tool_format.after_key)}"
            self._add(f"{index}_any", head, "additionalProperties", others)
            self.names.append(f"arg_{index}_any*")

    def _properties(self, whole: Schema, required: set[str]) -> dict[str, Any]:
        properties = dict(whole.get("properties") or {})
        for key in ("allOf", *_CHOICES):
            parts = whole.get(key)
            for part in parts if isinstance(parts, list) else ():
                self._refuse(key, "alternatives of all arguments")
                entries = self._followed(part)
                properties = {**dict(entries.get("properties") or {}), **properties}
                required |= set(entries.get("required", ())) if key == "allOf" else set()
        least, most = whole.get("minProperties", 0), whole.get("maxProperties", len(properties))
        if least > len(required) or most < len(properties):
            self._refuse(
                "minProperties" if least > len(required) else "maxProperties", "a number of arguments"
            )
        others = whole.get("additionalProperties", True)
        return properties | {key: others for key in sorted(required) if key not in properties}

    def _add(self, name: str, head: str, key: str, schema: object) -> None:
        text, terminal = self._text(key, schema), f"TEXT_{name.upper()}"
        if text is None:
            self.rules.append(f"arg_{name}: {head} value_{name} {self._end}")
            self.rules.append(f"value_{name}: %json {self._json(schema)}")
        elif self._has_end_token:
            self.rules.append(f"arg_{name}: {head} {terminal} {self._end}")
            self.rules.append(f"{terminal}: {text or f'/{_FREE}/'}")
        else:
            self.rules.append(f"arg_{name}: {head} text_{name}")
            self.rules.append(f"text_{name}[lazy]: {terminal}")
            self.rules.append(f"{terminal}: {f'{text} {self._end}' if text else f'/{_FREE}{self._closing}/'}")

    def _json(self, schema: object) -> str:
        value = dict(schema) if isinstance(schema, Mapping) else {}
        if '"$ref"' in json.dumps(value):
            definitions = {"tool": _moved(self._root), "value": _moved(value)}
            value = {"$defs": definitions, "$ref": "#/$defs/value"}
        return json.dumps({**value, "x-guidance": self._root.get("x-guidance", {})}, ensure_ascii=False)

    def _text(self, key: str, schema: object) -> str | None:
        """A terminal of an argument's value, which may be a string; empty: any text. None: it is JSON."""
        branches = [*self._branches(schema, 0)]
        if not any(map(_is_text, branches)):
            return None
        found = [self._terms(key, branch) for branch in branches]
        if any(terms is None for terms in found):
            self._refuse(key, "a string or a value that may look like one")
            return ""
        terms = [term for terms in found for term in terms or ()]
        return "" if "" in terms else f"(({' | '.join(terms)}) & {self._not_end})"

    def _branches(self, schema: object, depth: int) -> Iterator[Schema]:
        node = self._followed(schema)
        choices = [key for key in _CHOICES if isinstance(node.get(key), list)]
        if not choices:
            yield node
        elif depth >= _MAX_DEPTH or len(node) > 1:
            yield {"allOf": [node], "type": "string"} if _is_text(node) else {}
        else:
            for branch in node[choices[0]]:
                yield from self._branches(branch, depth + 1)

    def _terms(self, key: str, node: Schema) -> list[str] | None:
        """Terminals of all values of a schema, of which an empty one is any text; None: there are none."""
        if "const" in node or isinstance(node.get("enum"), list):
            values = [node["const"]] if "const" in node else node["enum"]
            return [json.dumps(value if isinstance(value, str) else json.dumps(value)) for value in values]
        kinds = node.get("type")
        found: list[str] = []
        for kind in [kinds] if isinstance(kinds, str) else kinds or ("any",):
            if kind == "string" and "allOf" not in node:
                found.append(" & ".join(self._string_terms(key, node)))
            elif kind in _SCALARS and not _BOUNDS & set(node):
                found.append(_SCALARS[kind])
            else:
                return None
        return found

    def _string_terms(self, key: str, node: Schema) -> Iterator[str]:
        if "minLength" in node or "maxLength" in node:
            yield rf"/(.|\n){{{int(node.get('minLength', 0))},{int(node.get('maxLength', -1))}}}/".replace(
                ",-1", ","
            )
        if "pattern" in node:
            term = _search(node["pattern"])
            reason = lark_refusal(f"start: A\nA: {term}")
            if reason is None:
                yield term
            else:
                self._refuse(f"{key}.pattern", reason)
        if node.get("format") in _FORMATS:
            yield f"/{_FORMATS[node['format']]}/"
        elif "format" in node:
            self._refuse(f"{key}.format", f"{str(node['format'])[:60]!r}")

    def _followed(self, schema: object) -> Schema:
        """A schema with what its ``$ref``, or the only part of its ``allOf``, says."""
        node = dict(schema) if isinstance(schema, Mapping) else {}
        for _ in range(_MAX_REFERENCES):
            parts = node.get("allOf")
            if "$ref" in node:
                found = resolve(self._root, node.pop("$ref"))
                target = None if found is None else found[0]
            elif isinstance(parts, list) and len(parts) == 1:
                target = node.pop("allOf")[0]
            else:
                return node
            node = {**(target if isinstance(target, Mapping) else {}), **node}
        return {}

    def _refuse(self, where: str, what: str) -> None:
        if self._is_strict:
            raise InvalidRequestError(
                f"{self._field} cannot be enforced in this model's format of calls: {where}: {what}",
                field="tools",
            )


def _is_text(node: Schema) -> bool:
    """Whether a string may be of this schema, which says so."""
    if "const" in node or isinstance(node.get("enum"), list):
        return any(isinstance(value, str) for value in (node.get("const"), *(node.get("enum") or ())))
    kinds = node.get("type")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _search(pattern: str) -> str:
    """A terminal of texts in which a pattern is found: all of them, or some where it has anchors."""
    begins = pattern.startswith("^")
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    body = slashed(body[:-1] if ends else body)
    return f"/{'' if begins else _FREE}(?:{body}){'' if ends else _FREE}/"


def _literal(text: str) -> str:
    return slashed(re.escape(text).replace("\\\n", "\n"))


def _moved(schema: object) -> Any:
    """A schema whose references to its root are references to ``#/$defs/tool``."""
    if isinstance(schema, list):
        return [_moved(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = f"#/$defs/tool{value[1:]}"
        elif key in ("enum", "const", "default", "examples"):
            moved[key] = value
        elif key not in ("$id", "x-guidance"):
            moved[key] = _moved(value)
    return moved
