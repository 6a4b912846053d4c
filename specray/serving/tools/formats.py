"""How model families write tool calls: one row per format, from which calls are read and are forced.

One table gives both, so that what is forced can always be read back. Text between calls is content, text
between reasoning markers is reasoning. Patterns are linear: nothing that a model writes makes them slow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_CALL_LEN: Final = 262_144
"""Characters of one call's text; a longer one stays content."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by tool name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as a model has written it."""

    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of this format contains, all of them."""
    open_pattern: str
    """Regular expression after which the text of calls begins."""
    opening: str
    """Text that the pattern takes away, to be given back when what follows is no call."""
    close: str | None
    """Text that ends it; None: the end of the answer."""
    read: Callable[[str, Schemas], Iterator[ToolCall]] | None
    """Reads the calls of one such text. Raises ValueError for what is malformed. None: Python, which
    ``python_stream`` reads in pieces and whole."""
    begin: str
    """Text before the first forced call."""
    before_name: str
    after_name: str
    """Text between a forced call's name and its arguments."""
    after: str
    """Text after a forced call's arguments."""
    between: str
    """Text between two forced calls."""
    end: str
    """Text after the last forced call."""
    allows_several: bool = True
    """Chat templates of this format take several calls in one turn."""
    can_be_forced: bool = True
    """A grammar of this format can be written."""
    writes_parameters: bool = False
    """Arguments are written one by one between tags, and not as JSON."""
    writes_python: bool = False
    """Arguments are keyword arguments of Python."""
    head: re.Pattern[str] | None = None
    """Text of a call up to its arguments, which begin with a bracket; None: they are not JSON. Its groups:
    ``name``, and ``object``, what it has of an object that ends behind the arguments."""
    tail: re.Pattern[str] = re.compile(r"[\s,;\]]*+")
    """Text that may be left behind the last call."""


def _json_calls(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Objects with ``name`` and ``arguments`` (or ``parameters``), one after the other or in a list."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        if text[position] in " \t\r\n;,":
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        for entry in value if isinstance(value, list) else [value]:
            yield _json_call(entry)


def _json_call(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(value["name"], _arguments(arguments))


def _arguments(value: object) -> str:
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are no object")
    try:
        return json_of(value)
    except TypeError as error:
        raise ValueError("an argument is no JSON value") from error


def json_of(value: object) -> str:
    """The JSON text of a value, which can be written in UTF-8. Raises ValueError, TypeError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair can be written in JSON, but not in UTF-8.
    return text if _is_utf8(text) else json.dumps(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_JSON_HEAD: Final = re.compile(
    r'[\s,;\[]{0,64}+(?P<object>\{\s{0,64}+"name"\s{0,64}+:\s{0,64}+"(?P<name>[\w.-]{1,64})"\s{0,64}+,'
    r'\s{0,64}+"(?:arguments|parameters)"\s{0,64}+:\s{0,64}+)(?=\{)'
)
_MISTRAL_HEAD: Final = re.compile(
    r"\s{0,64}+(?:\[TOOL_CALLS\])?\s{0,64}+(?P<name>[\w.-]{1,64}+)\s{0,64}+\[ARGS\]\s{0,64}+(?=\{)"
)
_MISTRAL_CALL: Final = re.compile(r"\s*+(?:\[TOOL_CALLS\])?\s*+([\w.-]{1,64}+)\s*+\[ARGS\]\s*+")


def _mistral_calls(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """A JSON list, or ``name[ARGS]{...}`` one after the other, as newer tokenizers have it."""
    if "[ARGS]" not in text:
        yield from _json_calls(text, schemas)
        return
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip():
        head = _MISTRAL_CALL.match(text, position)
        if head is None:
            raise ValueError("a call has no name")
        arguments, position = decoder.raw_decode(text, head.end())
        yield ToolCall(head[1], _arguments(arguments))


XML_FUNCTION: Final = re.compile(r"\s*<function=(?P<name>[^>\n]{1,64})>")
"""Pattern of a call's opening tag."""
_XML_PARAMETER: Final = re.compile(r"<parameter=([^>\n]{1,256})>")


def _xml_call(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """``<function=name>`` and a ``<parameter=key>`` for each argument, whose types the schema knows."""
    head = XML_FUNCTION.match(text)
    if head is None:
        raise ValueError("a call has no function")
    properties = schemas.get(head[1], {}).get("properties", {})
    arguments: dict[str, Any] = {}
    pieces = _XML_PARAMETER.split(text[head.end() :])
    for key, raw in zip(pieces[1::2], pieces[2::2], strict=True):
        value, closing, _ = raw.partition("</parameter>")
        if not closing:
            raise ValueError(f"parameter {key} is not closed")
        arguments[key] = parameter_of(value.removeprefix("\n"), properties.get(key))
    yield ToolCall(head[1].strip(), _arguments(arguments))


def parameter_of(text: str, schema: object) -> object:
    """An argument written as text: as its schema's type where it can be read so, else as a string.

    Args:
        text: without the line break behind the opening tag; that before the closing one is taken away.
    """
    text = text.removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_DEEPSEEK_CALL: Final = re.compile(
    r"\s*(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>)?([\w.-]{1,64})<?(?:｜tool▁sep｜>|\n```json\n)\s*"
)


_DEEPSEEK_TAIL: Final = re.compile(r"\s{0,64}+(?:```)?\s{0,64}+(?:<｜tool▁call▁end｜>)?\s{0,64}+")
_DEEPSEEK_HEAD: Final = re.compile(
    _DEEPSEEK_TAIL.pattern + r"(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]{1,64})"
    r"<?(?:｜tool▁sep｜>|\n```json\n)\s{0,64}+(?=\{)"
)


def _deepseek_calls(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip():
        head = _DEEPSEEK_CALL.match(text, position)
        if head is None:
            raise ValueError("a call has no name")
        arguments, position = decoder.raw_decode(text, head.end())
        yield ToolCall(head[1], _arguments(arguments))
        tail = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?").match(text, position)
        position = position if tail is None else tail.end()


FORMATS: Final = (
    ToolFormat(
        name="qwen3_coder",
        signs=("<tool_call>", "<function="),
        open_pattern=r"<tool_call>",
        opening="<tool_call>",
        close="</tool_call>",
        read=_xml_call,
        begin="",
        before_name="<tool_call>\n<function=",
        after_name=">\n",
        after="</function>\n</tool_call>",
        between="\n",
        end="",
        writes_parameters=True,
    ),
    ToolFormat(
        name="hermes",
        signs=("<tool_call>",),
        open_pattern=r"<tool_call>",
        opening="<tool_call>",
        close="</tool_call>",
        read=_json_calls,
        begin="",
        before_name='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
        end="",
        head=_JSON_HEAD,
    ),
    ToolFormat(
        name="mistral_args",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        open_pattern=r"\[TOOL_CALLS\]",
        opening="[TOOL_CALLS]",
        close=None,
        read=_mistral_calls,
        begin="",
        before_name="[TOOL_CALLS]",
        after_name="[ARGS]",
        after="",
        between="",
        end="",
        head=_MISTRAL_HEAD,
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        open_pattern=r"\[TOOL_CALLS\]",
        opening="[TOOL_CALLS]",
        close=None,
        read=_mistral_calls,
        begin="[TOOL_CALLS] [",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after="}",
        between=", ",
        end="]",
        head=_JSON_HEAD,
    ),
    ToolFormat(
        name="deepseek_v31",
        signs=("<｜tool▁calls▁begin｜>",),
        open_pattern=r"<｜tool▁calls▁begin｜>",
        opening="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        read=_deepseek_calls,
        begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
        head=_DEEPSEEK_HEAD,
        tail=_DEEPSEEK_TAIL,
    ),
    ToolFormat(
        name="llama3_json",
        signs=("<|python_tag|>",),
        open_pattern=r'<\|python_tag\|>|\A\s{0,64}(?=\{\s{0,64}"name"\s{0,64}:)',
        opening="",
        close=None,
        read=_json_calls,
        begin="",
        before_name='{"name": "',
        after_name='", "parameters": ',
        after="}",
        between="; ",
        end="",
        head=_JSON_HEAD,
        allows_several=False,
    ),
    ToolFormat(
        name="pythonic",
        signs=("[func_name1(params_name1=params_value1",),
        open_pattern=r"\A\s{0,64}\[(?=[A-Za-z_][\w.]{0,63}\()",
        opening="[",
        close=None,
        read=None,
        begin="[",
        before_name="",
        after_name="(",
        after=")",
        between=", ",
        end="]",
        can_be_forced=False,
        writes_python=True,
    ),
)
"""All formats; the first whose signs a template contains is the model's."""
MARKERS: Final = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<think>",
    "</think>",
)
"""Texts that may be special tokens of a vocabulary and are needed to read an answer."""


def find_format(chat_template: str | None) -> ToolFormat | None:
    """The format of calls that a chat template writes; None: it is not known."""
    if chat_template is None:
        return None
    return next((row for row in FORMATS if all(sign in chat_template for sign in row.signs)), None)
