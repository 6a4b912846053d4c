"""Turns the many fields by which clients ask for structured output into one grammar.

OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields, SGLang's
``regex``, ``ebnf`` and ``json_schema``, and llama.cpp's ``grammar`` and ``json_schema`` say the same in
different words. One request may use one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance.gbnf_to_lark import gbnf_to_lark

from specray.errors import InvalidRequestError, shown
from specray.grammar.schemas import enforced
from specray.types import Grammar, GrammarKind

FIELDS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
)
"""Names of all request fields that may hold a grammar."""
MODIFIERS: Final = ("guided_whitespace_pattern", "guided_decoding_backend")
"""Names of request fields that say how a grammar of ``guided_*`` is meant."""

WHITESPACE: Final = r"[ \n\t]{1,8}"
"""Whitespace between JSON tokens where any is allowed: bounded, or a model may write it without end."""
MAX_TEXT_LEN: Final = 65_536
"""Characters of a grammar, or of a schema, of a request."""
_MAX_CHOICES: Final = 1024
_MAX_PATTERN_LEN: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STRUCTURED: Final = ("json", "regex", "choice", "grammar", "json_object")
_STRUCTURED_OPTIONS: Final = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def grammar_of(fields: Mapping[str, Any]) -> tuple[Grammar, str] | None:
    """The grammar that a request asks for, and the field that asks for it.

    Args:
        fields: those of ``FIELDS`` and ``MODIFIERS`` that the request has; None counts as absent.

    Returns:
        None when the output is free text.

    Raises:
        InvalidRequestError: a field is malformed, or two fields hold a grammar.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    pattern = _whitespace(fields.get("guided_whitespace_pattern"), "guided_whitespace_pattern")
    found = [
        (grammar, name)
        for name, value in given.items()
        if (grammar := _READERS[name](value, name, pattern)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise InvalidRequestError(f"{names} are both set; allowed: one of them", field=found[1][1])
    return found[0] if found else None


def asking_field(fields: Mapping[str, Any]) -> str | None:
    """Name of a field that seems to ask for a grammar, which may take long to read; None: there is none."""
    return next((name for name in FIELDS if _asks(fields.get(name))), None)


def _asks(value: object) -> bool:
    # Most requests with a ``response_format`` say that they want text.
    return value is not None and not (isinstance(value, dict) and value.get("type") == "text")


def json_grammar(
    schema: object, *, is_compact: bool = False, whitespace: str | None = None, is_loose: bool = False
) -> Grammar:
    """The grammar of a JSON schema.

    Args:
        schema: a JSON schema, an object or a boolean.
        is_loose: what cannot be enforced is left out, where it would be refused.
        is_compact: JSON as ``json.dumps`` writes it, with no choice of whitespace, so that more tokens are
            forced.
        whitespace: a regular expression for whitespace between JSON tokens; default: a few characters.
    """
    if is_compact:
        options: dict[str, Any] = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
    else:
        options = {"whitespace_pattern": whitespace or WHITESPACE}
    try:
        text = json.dumps(enforced(schema, options, is_loose=is_loose), ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError("a JSON schema is nested too deeply", field="schema") from None
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _response_format(value: Any, field: str, whitespace: str | None) -> Grammar | None:
    if not isinstance(value, dict):
        raise _wrong(field, value, "an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return json_grammar({"type": "object"} if schema is None else _schema(schema, f"{field}.schema"))
    if kind == "json_schema":
        return _openai_schema(value.get("json_schema"), f"{field}.json_schema")
    raise _wrong(f"{field}.type", kind, "text, json_object or json_schema")


def _openai_schema(value: Any, field: str) -> Grammar:
    if not isinstance(value, dict):
        raise _wrong(field, value, "an object with name and schema")
    name = value.get("name")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise _wrong(f"{field}.name", name, "1..64 letters, digits, _ and -")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{field}.strict", strict, "true or false")
    if value.get("schema") is None:
        raise InvalidRequestError(
            f"{field}.schema is missing; allowed: a JSON schema", field=f"{field}.schema"
        )
    schema = _schema(value["schema"], f"{field}.schema")
    return json_grammar(schema, is_compact=bool(strict), is_loose=not strict)


def _structured_outputs(value: Any, field: str, whitespace: str | None) -> Grammar | None:
    if not isinstance(value, dict):
        raise _wrong(field, value, f"an object with one of {', '.join(_STRUCTURED)}")
    for name, entry in value.items():
        if name not in (*_STRUCTURED, *_STRUCTURED_OPTIONS) and entry is not None:
            raise InvalidRequestError(
                f"{field}.{name[:60]} is not supported; allowed: {', '.join(_STRUCTURED)}",
                field=f"{field}.{name[:60]}",
            )
    kinds = [name for name in _STRUCTURED if value.get(name) not in (None, False)]
    if len(kinds) > 1:
        raise InvalidRequestError(f"{field} has {' and '.join(kinds)}; allowed: one of them", field=field)
    if not kinds:
        return None
    kind, name = kinds[0], f"{field}.{kinds[0]}"
    if kind == "json":
        pattern = _whitespace(value.get("whitespace_pattern"), f"{field}.whitespace_pattern")
        is_compact = bool(value.get("disable_any_whitespace"))
        return json_grammar(_schema(value[kind], name), is_compact=is_compact, whitespace=pattern)
    if kind == "json_object":
        return json_grammar({"type": "object"})
    readers = {"regex": _regex, "choice": _choice, "grammar": _any_grammar}
    return readers[kind](value[kind], name, None)


def _guided_json(value: Any, field: str, whitespace: str | None) -> Grammar:
    return json_grammar(_schema(value, field), whitespace=whitespace)


def _regex(value: Any, field: str, whitespace: str | None) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, field, "a regular expression"))


def _choice(value: Any, field: str, whitespace: str | None) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise _wrong(field, value, "a list of strings that are not empty")
    if not 1 <= len(value) <= _MAX_CHOICES:
        raise _wrong(field, len(value), f"1..{_MAX_CHOICES} strings", what=f"number of strings in {field}")
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(entry) for entry in value))


def _any_grammar(value: Any, field: str, whitespace: str | None) -> Grammar:
    """Lark, or GBNF (llama.cpp's and xgrammar's EBNF), which has ``::=``."""
    text = _text(value, field, "a Lark or EBNF grammar")
    return _ebnf(text, field, None) if "::=" in text else Grammar(GrammarKind.LARK, text)


def _ebnf(value: Any, field: str, whitespace: str | None) -> Grammar:
    text = _text(value, field, "an EBNF grammar")
    try:
        return Grammar(GrammarKind.LARK, gbnf_to_lark(text))
    except Exception as error:
        raise InvalidRequestError(
            f"{field} is no EBNF grammar: {' '.join(str(error).split())[:200]}", field=field
        ) from None


def _schema(value: Any, field: str) -> object:
    """A schema as an object or as JSON text."""
    if isinstance(value, str):
        _check_text(value, field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _wrong(field, value, "a JSON schema") from None
    if not isinstance(value, (dict, bool)):
        raise _wrong(field, value, "a JSON schema")
    check_length(value, field)
    return value


def check_length(value: object, field: str) -> None:
    """Raises InvalidRequestError for schemas that are too long. To write them out would hold up others."""
    length = least_length(value, MAX_TEXT_LEN)
    if length > MAX_TEXT_LEN:
        raise InvalidRequestError(
            f"{field} has at least {length} characters; allowed: at most {MAX_TEXT_LEN}", field=field
        )


def least_length(value: object, most: int) -> int:
    """Characters that a value has at least as JSON; what is beyond ``most`` is not all counted."""
    length, waiting = 0, [value]
    while waiting and length <= most:
        entry = waiting.pop()
        if isinstance(entry, str):
            length += len(entry) + 2
        elif isinstance(entry, Mapping):
            length += 2 + sum(len(key) for key in entry)
            waiting += entry.values()
        elif isinstance(entry, list):
            length += 2
            waiting += entry
        else:
            length += 1
    return length


def _text(value: Any, field: str, allowed: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(field, value, allowed)
    _check_text(value, field)
    return value


def _check_text(text: str, field: str) -> None:
    if len(text) > MAX_TEXT_LEN:
        raise _wrong(field, len(text), f"at most {MAX_TEXT_LEN}", what=f"number of characters in {field}")


def _whitespace(value: Any, field: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_PATTERN_LEN:
        raise _wrong(field, value, f"a regular expression of at most {_MAX_PATTERN_LEN} characters")
    return value


def _wrong(field: str, value: object, allowed: str, *, what: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{what or field} is {shown(value)}; allowed: {allowed}", field=field)


_READERS: Final = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _guided_json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _any_grammar,
    "regex": _regex,
    "ebnf": _ebnf,
    "grammar": _any_grammar,
    "json_schema": _guided_json,
}
