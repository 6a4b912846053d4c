"""Grammars under which an answer is calls of a request's tools, written in the model's own format.

``required`` and named choices leave nothing else. With ``auto`` and a strict tool the text is free up to a
marker, behind which only a valid call may come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from specray.errors import InvalidRequestError
from specray.grammar.forms import WHITESPACE
from specray.serving.tools.answer import REASONING_CLOSE, REASONING_OPEN
from specray.serving.tools.formats import MARKERS, ToolFormat
from specray.serving.tools.request import Tool, ToolMode, ToolUse
from specray.types import Grammar, GrammarKind

IsSpecial = Callable[[str], bool]
"""Tells whether a text is a special token of the vocabulary."""
_MARKER: Final = re.compile("(" + "|".join(map(re.escape, sorted(MARKERS, key=len, reverse=True))) + ")")


def forced_calls(
    use: ToolUse,
    tool_format: ToolFormat | None,
    is_special: IsSpecial,
    *,
    begins_in_reasoning: bool = False,
    may_reason: bool = False,
) -> Grammar | None:
    """The grammar that a request's tools ask for.

    Args:
        use: the request's tools.
        tool_format: how the model writes calls; None: not known.
        is_special: markers that are special tokens are written as such.
        begins_in_reasoning: the prompt ended with ``<think>``.
        may_reason: the model may write ``<think>`` first.

    Returns:
        None when the answer is free: no call is asked for, and no tool is strict.

    Raises:
        InvalidRequestError: calls are to be forced, and this model's format of calls cannot be.
    """
    is_required = use.mode is ToolMode.REQUIRED
    if use.mode is ToolMode.NONE or not (is_required or any(tool.is_strict for tool in use.callable_tools)):
        return None
    if tool_format is None or not tool_format.can_be_forced:
        name = "not known" if tool_format is None else tool_format.name
        raise InvalidRequestError(
            f"tool_choice or a strict tool cannot be enforced: this model's format of calls is {name}; "
            "allowed: tool_choice none, or auto with tools that are not strict",
            field="tool_choice" if is_required else "tools",
        )
    lark = _Lark(tool_format, is_special)
    think = lark.reasoning(begins_in_reasoning=begins_in_reasoning, may_reason=may_reason)
    calls = lark.calls(use.is_parallel and tool_format.allows_several)
    rules = [
        "%llguidance {}",
        *(lark.required(calls, think) if is_required else lark.free(calls, think)),
        "call: " + " | ".join(f"call_{index}" for index in range(len(use.callable_tools))),
        *(rule for index, tool in enumerate(use.callable_tools) for rule in lark.call(index, tool)),
    ]
    return Grammar(GrammarKind.LARK, "\n".join(rules))


class _Lark:
    """Rules of one format. The marker that begins calls stands apart: free text can come before it."""

    def __init__(self, tool_format: ToolFormat, is_special: IsSpecial) -> None:
        self._format = tool_format
        self._is_special = is_special
        first = _MARKER.match(tool_format.begin or tool_format.before_name)
        self._marker = first[1] if first else ""
        self._marks_each = bool(first) and not tool_format.begin

    def required(self, calls: str, think: Sequence[str]) -> Iterator[str]:
        """An answer that is calls, perhaps after reasoning."""
        yield f"start: {'think ' if think else ''}{self._text(self._marker)} {calls}"
        yield from think

    def free(self, calls: str, think: Sequence[str]) -> Iterator[str]:
        """Free text in which whatever follows the marker is calls."""
        if not self._marker:
            # Without a marker a call is told by its first character, as the reader does.
            opening = (self._format.begin or self._format.before_name)[0]
            yield f"start: {'think ' if think else ''}(FREE | {calls})"
            yield rf"FREE: /([^\{opening} \n](.|\n)*)?/"
            yield from think
            return
        yield "start: tagged* TEXT"
        yield r"TEXT: /(.|\n)*/"
        if self._is_special(self._marker):
            yield f"tagged: TEXT {self._marker} {calls}"
        else:
            yield f"marked[lazy]: TEXT {json.dumps(self._marker)}"
            yield f"tagged: marked {calls}"

    def reasoning(self, *, begins_in_reasoning: bool, may_reason: bool) -> list[str]:
        """Rules of ``think``; none when the model does not reason."""
        if not begins_in_reasoning and not may_reason:
            return []
        body = rf"/(.|\n)*{re.escape(REASONING_CLOSE)}/".replace("</", r"<\/")
        if self._is_special(REASONING_CLOSE):
            text = rf"THOUGHT {REASONING_CLOSE} /\s*/"
            rules = [r"THOUGHT: /(.|\n)*/"]
        else:
            text, rules = r"thought /\s*/", [f"thought[lazy]: {body}"]
        opening = "" if begins_in_reasoning else f"{self._text(REASONING_OPEN)} "
        return [f"think: {opening}{text}" + ("" if begins_in_reasoning else ' | ""'), *rules]

    def calls(self, several: bool) -> str:
        """What follows the first marker."""
        begin = "" if self._marks_each else self._format.begin[len(self._marker) :]
        again = self._text(self._format.between + (self._marker if self._marks_each else ""))
        more = f" ({again} call)*" if several else ""
        return f"{self._text(begin)} call{more} {self._text(self._format.end)}".strip()

    def call(self, index: int, tool: Tool) -> Iterator[str]:
        """The rules of one tool's calls, without a marker that stands apart."""
        before = self._format.before_name[len(self._marker) if self._marks_each else 0 :]
        head = self._text(before + tool.name + self._format.after_name)
        tail = self._text(self._format.after)
        if self._format.writes_parameters:
            yield f"call_{index}: {head} {' '.join(self._parameter_names(index, tool))} {tail}"
            yield from self._parameters(index, tool)
        else:
            yield f"call_{index}: {head} args_{index} {tail}"
            yield f"args_{index}: %json {_json(tool.parameters)}"

    def _parameter_names(self, index: int, tool: Tool) -> Iterator[str]:
        required = tool.parameters.get("required", ())
        for place, key in enumerate(tool.parameters.get("properties", {})):
            yield f"arg_{index}_{place}" + ("" if key in required else "?")

    def _parameters(self, index: int, tool: Tool) -> Iterator[str]:
        for place, (key, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            name = f"arg_{index}_{place}"
            head = json.dumps(f"<parameter={key}>\n")
            if isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema:
                yield f"{name}: {head} text_{index}_{place}"
                yield rf"text_{index}_{place}[lazy]: /(.|\n)*\n<\/parameter>\n/"
            elif isinstance(schema, dict) and all(
                isinstance(entry, str) for entry in schema.get("enum", [0])
            ):
                choices = " | ".join(json.dumps(entry) for entry in schema["enum"])
                yield f'{name}: {head} ({choices}) "\\n</parameter>\\n"'
            else:
                yield f'{name}: {head} value_{index}_{place} "\\n</parameter>\\n"'
                yield f"value_{index}_{place}: %json {_json(schema)}"

    def _text(self, value: str) -> str:
        """A text as Lark has it, markers that are special tokens as such."""
        parts = [part for part in _MARKER.split(value) if part]
        return " ".join(part if self._is_special(part) else json.dumps(part) for part in parts)


def _json(schema: object) -> str:
    if isinstance(schema, Mapping):
        options: dict[str, Any] = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        schema = {**schema, **options}
    return json.dumps(schema, ensure_ascii=False)
