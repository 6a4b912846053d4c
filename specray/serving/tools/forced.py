"""Grammars under which an answer is calls of a request's tools, written in the model's own format.

``required`` and named choices leave nothing else. With ``auto`` and a strict tool the text is free up to a
marker, behind which only a valid call may come; a format of the text that is asked for holds unless there are
calls. Reasoning comes before all of it and is free.
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

TokenId = Callable[[str], int | None]
"""Tells the id of the token that is a marker, where the vocabulary has one; a model writes no other."""
_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)
"""What stands for itself in a regular expression, and an escaped character, which stays."""
_SPACE: Final = r"/[ \n\t]{0,8}/"
"""Space behind reasoning: bounded, or a model may write it without end."""
_MARKER: Final = re.compile("(" + "|".join(map(re.escape, sorted(MARKERS, key=len, reverse=True))) + ")")


def forced_calls(
    use: ToolUse,
    tool_format: ToolFormat | None,
    token_id: TokenId,
    *,
    text: Grammar | None = None,
    begins_in_reasoning: bool = False,
    may_reason: bool = False,
) -> Grammar | None:
    """The grammar that a request's tools ask for.

    Args:
        use: the request's tools.
        tool_format: how the model writes calls; None: not known.
        token_id: markers that are tokens of their own are written as such.
        text: what an answer without calls has to be; None: free text.
        begins_in_reasoning: the prompt ended with ``<think>``.
        may_reason: the model may write ``<think>`` first.

    Returns:
        None when the answer is free: nothing is asked of calls or text, and no tool is strict.

    Raises:
        InvalidRequestError: calls are to be forced, and this model's format of calls cannot be.
    """
    is_required = use.mode is ToolMode.REQUIRED
    is_strict = any(tool.is_strict for tool in use.callable_tools)
    if use.mode is ToolMode.NONE or not (is_required or is_strict or text is not None):
        return None
    field = "tool_choice" if is_required else "tools"
    if tool_format is None or not tool_format.can_be_forced:
        name = "not known" if tool_format is None else tool_format.name
        raise InvalidRequestError(
            f"{field} cannot be enforced: this model's format of calls is {name}; allowed: "
            "tool_choice none, or auto with tools that are not strict and free text",
            field=field,
        )
    answer = [] if text is None or is_required else text_rules(text)
    if answer is None:
        raise InvalidRequestError(
            "tools cannot be enforced together with this grammar of the text; allowed: a JSON schema, "
            "a regular expression or a choice",
            field=field,
        )
    lark = _Lark(tool_format, token_id)
    reasons = begins_in_reasoning or may_reason
    think = _reasoning(token_id, begins_in_reasoning=begins_in_reasoning) if reasons else []
    calls = lark.calls(use.is_parallel and tool_format.allows_several)
    rules = [
        "%llguidance {}",
        *(lark.required(calls, think) if is_required else lark.free(calls, think, answer)),
        "call: " + " | ".join(f"call_{index}" for index in range(len(use.callable_tools))),
        *(rule for index, tool in enumerate(use.callable_tools) for rule in lark.call(index, tool)),
    ]
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def after_reasoning(text: Grammar, token_id: TokenId, *, begins_in_reasoning: bool) -> Grammar | None:
    """The grammar of an answer whose text, behind its reasoning, is of this grammar.

    Args:
        token_id: markers that are tokens of their own are written as such.
        begins_in_reasoning: the prompt ended with ``<think>``; else the model may write it.

    Returns:
        None for a Lark grammar of several rules.
    """
    rules = text_rules(text)
    if rules is None:
        return None
    think = _reasoning(token_id, begins_in_reasoning=begins_in_reasoning)
    return Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", "start: think answer", *think, *rules]))


def text_rules(text: Grammar) -> list[str] | None:
    """The rule of ``answer``, a text of this grammar; None for a grammar of several rules."""
    if text.kind is GrammarKind.JSON_SCHEMA:
        return [f"answer: %json {text.source}"]
    if text.kind is GrammarKind.REGEX:
        return [f"answer: /{_SLASH.sub(_escaped, text.source)}/"]
    is_one_rule = text.source.startswith("start:") and "\n" not in text.source
    return ["answer:" + text.source.removeprefix("start:")] if is_one_rule else None


def _literal(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def _escaped(match: re.Match[str]) -> str:
    """A slash or a line end of a regular expression as it stands between slashes."""
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _reasoning(token_id: TokenId, *, begins_in_reasoning: bool) -> list[str]:
    """Rules of ``think``."""
    if token_id(REASONING_CLOSE) is not None:
        text = rf"THOUGHT {_text(REASONING_CLOSE, token_id)} {_SPACE}"
        rules = [r"THOUGHT: /(.|\n)*/"]
    else:
        body = rf"/(.|\n)*{re.escape(REASONING_CLOSE)}/".replace("</", r"<\/")
        text, rules = f"thought {_SPACE}", [f"thought[lazy]: {body}"]
    if begins_in_reasoning:
        return [f"think: {text}", *rules]
    return [f'think: {_text(REASONING_OPEN, token_id)} {text} | ""', *rules]


def _text(value: str, token_id: TokenId) -> str:
    """A text as Lark has it, markers that are tokens of their own as such."""
    return " ".join(
        json.dumps(part) if (marker_id := token_id(part)) is None else f"<[{marker_id}]>"
        for part in _MARKER.split(value)
        if part
    )


def arguments_rule(name: str, tool: Tool) -> str:
    """The rule of this name for the arguments of a tool as JSON."""
    return f"{name}: %json {_json(tool.parameters)}"


class _Lark:
    """Rules of one format. The marker that begins calls stands apart: free text can come before it."""

    def __init__(self, tool_format: ToolFormat, token_id: TokenId) -> None:
        self._format = tool_format
        self._token_id = token_id
        first = _MARKER.match(tool_format.begin or tool_format.before_name)
        self._marker = first[1] if first else ""
        self._marks_each = bool(first) and not tool_format.begin

    def required(self, calls: str, think: Sequence[str]) -> Iterator[str]:
        """An answer that is calls, perhaps after reasoning."""
        yield f"start: {'think ' if think else ''}{self._text(self._marker)} {calls}"
        yield from think

    def free(self, calls: str, think: Sequence[str], answer: Sequence[str]) -> Iterator[str]:
        """Free text in which whatever follows the marker is calls; or calls, or else ``answer``."""
        if answer:
            yield f"start: {'think ' if think else ''}({self._text(self._marker)} {calls} | answer)"
            yield from (*think, *answer)
            return
        if not self._marker:
            # Without a marker a call is told by its first character, as the reader does.
            opening = (self._format.begin or self._format.before_name)[0]
            yield f"start: {'think ' if think else ''}(FREE | {calls})"
            yield rf"FREE: /([^\{opening} \n](.|\n)*)?/"
            yield from think
            return
        yield f"start: {'think ' if think else ''}tagged* TEXT"
        yield r"TEXT: /(.|\n)*/"
        yield from think
        if self._token_id(self._marker) is not None:
            yield f"tagged: TEXT {self._text(self._marker)} {calls}"
        else:
            yield f"marked[lazy]: TEXT {json.dumps(self._marker)}"
            yield f"tagged: marked {calls}"

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
            yield arguments_rule(f"args_{index}", tool)

    def _parameter_names(self, index: int, tool: Tool) -> Iterator[str]:
        required = tool.parameters.get("required", ())
        for place, key in enumerate(tool.parameters.get("properties", {})):
            yield f"arg_{index}_{place}" + ("" if key in required else "?")

    def _parameters(self, index: int, tool: Tool) -> Iterator[str]:
        end = self._format.after_value
        for place, (key, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            name = f"arg_{index}_{place}"
            head = self._text(f"{self._format.before_key}{key}{self._format.after_key}")
            if isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema:
                text = f"text_{index}_{place}"
                if any(self._token_id(part) is not None for part in _MARKER.findall(end)):
                    yield f"{name}: {head} {text.upper()} {self._text(end)}"
                    yield rf"{text.upper()}: /(.|\n)*/"
                else:
                    yield f"{name}: {head} {text}"
                    yield rf"{text}[lazy]: /(.|\n)*{_literal(end)}/"
            elif isinstance(schema, dict) and all(
                isinstance(entry, str) for entry in schema.get("enum", [0])
            ):
                choices = " | ".join(json.dumps(entry) for entry in schema["enum"])
                yield f"{name}: {head} ({choices}) {self._text(end)}"
            else:
                yield f"{name}: {head} value_{index}_{place} {self._text(end)}"
                yield f"value_{index}_{place}: %json {_json(schema)}"

    def _text(self, value: str) -> str:
        return _text(value, self._token_id)


def _json(schema: object) -> str:
    if isinstance(schema, Mapping):
        options: dict[str, Any] = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        schema = {**schema, **options}
    return json.dumps(schema, ensure_ascii=False)
