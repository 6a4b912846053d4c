"""Grammars under which an answer is calls of a request's tools, written in the model's own format.

``required`` and named choices leave nothing else. With ``auto`` and a strict tool the text is free up to a
marker, after which only a valid call may come; a format of the text that is asked for holds unless there are
calls. Reasoning comes before all of it and is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from specray.errors import InvalidRequestError
from specray.grammar import (
    MAX_SOURCE_LEN,
    MAX_TEXT_LEN,
    WHITESPACE,
    common_refusal,
    enforced,
    least_length,
    named_tokens,
    plain,
    refusal,
    slashed,
)
from specray.serving.tools.answer import REASONING_CLOSE, REASONING_OPEN
from specray.serving.tools.formats import MARKERS, ToolFormat
from specray.serving.tools.parameters import ParameterRules
from specray.serving.tools.request import Tool, ToolMode, ToolUse
from specray.types import Grammar, GrammarKind

TokenId = Callable[[str], int | None]
"""Tells the id of the token that is a marker, where the vocabulary has one; a model writes no other."""
_SPACE: Final = r"/[ \n\t]{0,8}/"
"""Space after reasoning: bounded, or a model may write it without end."""
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
        None when the answer is free: nothing is asked of calls or text, and no tool is strict. ``text``
        itself where it spells the markers of reasoning.

    Raises:
        InvalidRequestError: calls are to be forced, and this model's format of calls cannot be, or the
            parameters of a strict tool, or no arguments are of a tool's schema.
    """
    if not use.has_forced(text):
        return None
    is_required = use.mode is ToolMode.REQUIRED
    field = "tool_choice" if is_required else "tools"
    if tool_format is None or not tool_format.can_be_forced:
        name = "not known" if tool_format is None else tool_format.name
        raise InvalidRequestError(
            f"{field} cannot be enforced: this model's format of calls is {name}; allowed: "
            "tool_choice none, or auto with tools that are not strict and free text",
            field=field,
        )
    answer = [] if text is None or is_required else text_rules(text)
    if text is not None and not is_required and spells_reasoning(text, token_id):
        if not any(tool.is_strict for tool in use.callable_tools):
            return text
        answer = None
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

    def rules(tools: Sequence[Tool]) -> Iterator[str]:
        yield from lark.required(calls, think) if is_required else lark.free(calls, think, answer)
        yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
        yield from (rule for index, tool in enumerate(tools) for rule in lark.call(index, tool))

    return grammar_of_calls(use.callable_tools, rules)


def grammar_of_calls(tools: Sequence[Tool], rules: Callable[[Sequence[Tool]], Iterable[str]]) -> Grammar:
    """The grammar of these rules. Where it is too long, tools that are not strict have any arguments.

    Args:
        rules: makes them for the tools; it may raise InvalidRequestError.
    """
    tools = [replace(tool, parameters=plain(tool.parameters)) for tool in tools]
    free = [tool if tool.is_strict else replace(tool, parameters={"type": "object"}) for tool in tools]
    if least_length([tool.parameters for tool in tools], MAX_SOURCE_LEN) > MAX_SOURCE_LEN:
        tools = free
    source = "\n".join(["%llguidance {}", *rules(tools)])
    if len(source) > MAX_SOURCE_LEN and tools is not free:
        source = "\n".join(["%llguidance {}", *rules(free)])
    return Grammar(GrammarKind.LARK, source)


def after_reasoning(text: Grammar, token_id: TokenId, *, begins_in_reasoning: bool) -> Grammar | None:
    """The grammar of an answer whose text, after its reasoning, is of this grammar.

    Args:
        token_id: markers that are tokens of their own are written as such.
        begins_in_reasoning: the prompt ended with ``<think>``; else the model may write it.

    Returns:
        None for a Lark grammar of several rules, and one that spells the markers of reasoning.
    """
    rules = text_rules(text)
    if rules is None or spells_reasoning(text, token_id):
        return None
    think = _reasoning(token_id, begins_in_reasoning=begins_in_reasoning)
    return Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", "start: think answer", *think, *rules]))


def spells_reasoning(text: Grammar, token_id: TokenId) -> bool:
    """Whether a grammar asks for the tokens around reasoning, so that it is the whole answer."""
    markers = (REASONING_OPEN, REASONING_CLOSE)
    ids = [found for marker in markers if (found := token_id(marker)) is not None]
    return any(
        token in markers if isinstance(token, str) else any(found in token for found in ids)
        for token in named_tokens(text)
    )


def arguments_rule(name: str, tool: Tool) -> str:
    """The rule of this name for the arguments of a tool as JSON. Raises what ``forced_calls`` raises."""
    return f"{name}: %json {json.dumps(_enforced(tool).parameters, ensure_ascii=False)}"


def _enforced(tool: Tool) -> Tool:
    """A tool with its parameters as far as they can be enforced."""
    length = least_length(tool.parameters, MAX_TEXT_LEN)
    if length > MAX_TEXT_LEN and tool.is_strict:
        raise InvalidRequestError(
            f"{tool.field} has at least {length} characters; allowed for a strict tool: at most "
            f"{MAX_TEXT_LEN}",
            field="tools",
        )
    parameters = {"type": "object"} if length > MAX_TEXT_LEN else tool.parameters
    parameters = enforced(parameters, {"whitespace_pattern": WHITESPACE}, is_loose=not tool.is_strict)
    reason = refusal(parameters) if tool.is_strict else common_refusal(parameters)
    if reason is not None:
        raise InvalidRequestError(f"{tool.field} cannot be enforced: {reason}", field="tools")
    return replace(tool, parameters=parameters)


def text_rules(text: Grammar) -> list[str] | None:
    """The rule of ``answer``, a text of this grammar; None for a grammar of several rules."""
    if text.kind is GrammarKind.JSON_SCHEMA:
        return [f"answer: %json {text.source}"]
    if text.kind is GrammarKind.REGEX:
        return [f"answer: /{slashed(text.source)}/"]
    is_one_rule = text.source.startswith("start:") and "\n" not in text.source
    return ["answer:" + text.source.removeprefix("start:")] if is_one_rule else None


def _reasoning(token_id: TokenId, *, begins_in_reasoning: bool) -> list[str]:
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
    return " ".join(
        json.dumps(part) if (marker_id := token_id(part)) is None else f"<[{marker_id}]>"
        for part in _MARKER.split(value)
        if part
    )


class _Lark:
    """Rules of one format. The marker that begins calls stands apart: free text can come before it."""

    def __init__(self, tool_format: ToolFormat, token_id: TokenId) -> None:
        self._format = tool_format
        self._token_id = token_id
        first = _MARKER.match(tool_format.begin or tool_format.before_name)
        self._marker = first[1] if first else ""
        self._marks_each = bool(first) and not tool_format.begin

    def required(self, calls: str, think: Sequence[str]) -> Iterator[str]:
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
        begin = "" if self._marks_each else self._format.begin[len(self._marker) :]
        again = self._text(self._format.between + (self._marker if self._marks_each else ""))
        more = f" ({again} call)*" if several else ""
        return f"{self._text(begin)} call{more} {self._text(self._format.end)}".strip()

    def call(self, index: int, tool: Tool) -> Iterator[str]:
        before = self._format.before_name[len(self._marker) if self._marks_each else 0 :]
        head = self._text(before + tool.name + self._format.after_name)
        tail = self._text(self._format.after)
        if self._format.writes_parameters:
            arguments = ParameterRules(index, _enforced(tool), self._format, self._text)
            yield f"call_{index}: {head} {' '.join(arguments.names)} {tail}"
            yield from arguments.rules
        else:
            yield f"call_{index}: {head} args_{index} {tail}"
            yield arguments_rule(f"args_{index}", tool)

    def _text(self, value: str) -> str:
        return _text(value, self._token_id)
