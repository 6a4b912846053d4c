"""Says what of a JSON schema can be enforced: why one is refused, and what is left of one that is loosened.

A keyword is judged by llguidance itself, on the part of the schema that has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher

from specray.grammar.bounds import make_limits, sentence
from specray.grammar.endless import endless_schema, joined, objects_within, resolve

MAX_PROPERTIES: Final = 1_000
"""Properties of a JSON schema, over all its objects; more are refused."""
LENIENT: Final = "lenient"
"""Option of a schema that has been loosened: alternatives of ``oneOf`` may overlap."""
_OPTIONS: Final = "x-guidance"
_UNSATISFIABLE: Final = ("Unsatisfiable schema", "Regex is empty")
"""How llguidance's errors begin where no value is of a schema."""
_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems")
"""Keywords whose value is a schema."""
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_MAX_PATH_LEN: Final = 120
_NOTES: Final = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
)
"""Keywords for people."""
_KEPT: Final = ("type", "properties", "required", "items")
"""Keywords that go last where two cannot be enforced together."""
_APPLIED: Final = ("$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions", "$schema", "$id", _OPTIONS)
"""Keywords that cannot be judged without the rest of the schema, or mean nothing by themselves."""


def refusal(schema: object) -> str | None:
    """Why a schema cannot be enforced, with the path of the keyword; None: it can be."""
    reason = common_refusal(schema)
    if reason is not None:
        return reason
    error = _error(schema)
    if error is None:
        return None
    for node, path in _nodes(schema):
        bad = _bad_keys(node)
        if bad:
            reason = _error({bad[0]: _own(node)[bad[0]]}) or _error(_own(node)) or error
            return _placed(path if f'"{bad[0]}"' in reason else joined(path, bad[0]), reason)
    one_ofs = [node for node, _ in _nodes(schema) if "oneOf" in node]
    for node, path in _nodes(schema):
        if "$ref" in node and resolve(schema, node["$ref"]) is None:
            return _placed(joined(path, "$ref"), f"{str(node['$ref'])[:100]!r} is not found")
        if (
            "oneOf" in node
            and _is_quick(len(one_ofs), schema)
            and (reason := _error({"oneOf": node["oneOf"], **_definitions(schema)}))
        ):
            return _placed(path, reason)
    return error


def enforced(schema: Any, options: dict[str, Any], *, is_loose: bool) -> Any:
    """A schema as llguidance is to have it, without keywords that ask for nothing.

    Args:
        options: llguidance's, of whitespace; options that the schema itself has could turn refusals off.
        is_loose: it is loosened, too.
    """
    if not isinstance(schema, dict):
        return schema
    schema = plain({key: value for key, value in schema.items() if key != _OPTIONS})
    schema = loosened(schema) if is_loose else schema
    return {**schema, _OPTIONS: {**options, **schema.get(_OPTIONS, {})}}


def loosened(schema: Any) -> Any:
    """A schema without what cannot be enforced; one with ``common_refusal`` stays as it is."""
    if not isinstance(schema, dict) or common_refusal(schema) is not None or _fits(schema):
        return schema
    options = {LENIENT: True}
    looser = {**_without_bad(schema, schema), _OPTIONS: options}
    if _fits(looser):
        return looser
    # What is left are schemas that cannot be joined with each other.
    properties = looser.get("properties")
    if isinstance(properties, dict) and _is_quick(len(properties), schema):
        rest = {key: value for key, value in looser.items() if key not in ("allOf", "anyOf", "oneOf", "$ref")}
        kept = {name: entry if _fits_alone(entry, looser) else {} for name, entry in properties.items()}
        looser = {**rest, "properties": kept}
        if _fits(looser):
            return looser
    kind = schema.get("type")
    return {"type": kind, _OPTIONS: options} if isinstance(kind, str) and _fits({"type": kind}) else {}


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without keywords that ask for nothing: annotations, ``uniqueItems: false``."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node, _ in _nodes(copy):
        for key in [key for key, value in node.items() if _asks_nothing(key, value)]:
            del node[key]
    return copy


def _is_quick(num_parts: int, schema: object) -> bool:
    # Characters of schemas that are judged to find the one that cannot be enforced: less than a second.
    return num_parts * len(json.dumps(schema)) <= 1_000_000


def _placed(path: str, reason: str) -> str:
    shown = path if len(path) <= _MAX_PATH_LEN else f"...{path[-_MAX_PATH_LEN:]}"
    return f"{shown}: {reason}" if path else reason


def _asks_nothing(key: str, value: object) -> bool:
    if key in _NOTES:
        return True
    if key == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return value == {}
    return (key in ("uniqueItems", "not") and value is False) or (
        key in ("unevaluatedProperties", "unevaluatedItems") and value is True
    )


def common_refusal(schema: object) -> str | None:
    """Why neither a schema nor a looser one can be enforced; None: no such reason was found."""
    properties = (node.get("properties") for node in objects_within(schema))
    num_properties = sum(len(entries) for entries in properties if isinstance(entries, dict))
    if num_properties > MAX_PROPERTIES:
        return f"properties has {num_properties} entries in all; allowed: at most {MAX_PROPERTIES}"
    path = endless_schema(schema)
    if path is not None:
        return f"{path[-_MAX_PATH_LEN:]} needs itself, so that no value of it ever ends"
    error = _raw_error(schema)
    return sentence(error) if error.startswith(_UNSATISFIABLE) else None


def _raw_error(schema: object) -> str:
    return LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema(json.dumps(schema)), limits=make_limits()
    )


def _error(schema: object) -> str | None:
    return sentence(error) if (error := _raw_error(schema)) else None


def _fits(schema: object) -> bool:
    """Whether all keywords of a schema are supported; there may be no value of it."""
    error = _raw_error(schema)
    return not error or error.startswith(_UNSATISFIABLE)


def _fits_alone(schema: object, root: dict[str, Any]) -> bool:
    return not isinstance(schema, dict) or not _raw_error({**schema, **_definitions(root)})


def _definitions(root: object) -> dict[str, Any]:
    entries = root if isinstance(root, dict) else {}
    return {key: entries[key] for key in ("$defs", "definitions", _OPTIONS) if key in entries}


def _nodes(schema: object) -> Iterator[tuple[dict[str, Any], str]]:
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        node, path = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node, path
        found: list[tuple[object, str]] = [(node.get(key), joined(path, key)) for key in _SCHEMAS]
        for key in (*_LISTS, "items"):
            entries = node.get(key)
            if isinstance(entries, list):
                found += [(entry, f"{joined(path, key)}[{index}]") for index, entry in enumerate(entries)]
        for key in _MAPS:
            entries = node.get(key)
            if isinstance(entries, dict):
                found += [(entry, joined(joined(path, key), name)) for name, entry in entries.items()]
        waiting += reversed(found)


def _own(node: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for key, value in node.items():
        if key in _APPLIED:
            continue
        if isinstance(value, dict) and (key in _SCHEMAS or key in _MAPS):
            value = True if key in _SCHEMAS else dict.fromkeys(value, True)
        elif isinstance(value, list) and (key in _LISTS or key in _SCHEMAS):
            value = [True] * len(value)
        own[key] = value
    return own


def _bad_keys(node: dict[str, Any]) -> list[str]:
    own = _own(node)
    if _fits(own):
        return []
    bad = [key for key, value in own.items() if not _fits({key: value})]
    rest = {key: value for key, value in own.items() if key not in bad}
    if not _fits(rest):
        doubtful = sorted(rest, key=lambda key: key in _KEPT)
        others = ({name: value for name, value in rest.items() if name != key} for key in doubtful)
        apart = (key for key, other in zip(doubtful, others, strict=True) if _fits(other))
        bad.append(next(apart, doubtful[0]))
    return bad


def _without_bad(schema: Any, root: object) -> Any:
    """A schema, and all within, without keywords that cannot be enforced and references to nothing."""
    if not isinstance(schema, dict):
        return schema
    bad = _bad_keys(schema)
    if "$ref" in schema and resolve(root, schema["$ref"]) is None:
        bad.append("$ref")
    looser = {key: value for key, value in schema.items() if key not in bad}
    for key, value in looser.items():
        if key in _MAPS and isinstance(value, dict):
            looser[key] = {name: _without_bad(entry, root) for name, entry in value.items()}
        elif key in _SCHEMAS and isinstance(value, dict):
            looser[key] = _without_bad(value, root)
        elif key in (*_LISTS, "items") and isinstance(value, list):
            looser[key] = [_without_bad(entry, root) for entry in value]
    return looser
