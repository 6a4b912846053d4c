"""Grammars under which an answer of gpt-oss is calls, or text of a form: reasoning is free before either.

Only the body of the final message, or of the message that calls, is bound; which messages come is the
format's own order. Markers are the model's control tokens, which no text between them can spell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from specray.errors import InvalidRequestError
from specray.serving.tools.forced import arguments_rule, grammar_of_calls, text_rules
from specray.serving.tools.harmony.channels import ASSISTANT, ChannelName, Channels, Marker
from specray.serving.tools.harmony.prompt import ChannelPrompt, PromptEnd
from specray.serving.tools.request import Tool, ToolMode, ToolUse
from specray.types import Grammar

_TEXT: Final = "TEXT"


def forced_channels(
    prompt: ChannelPrompt, use: ToolUse | None, text: Grammar | None, *, field: str
) -> Grammar | None:
    """The grammar that a request asks for.

    Args:
        prompt: where the prompt ends.
        use: the request's tools; None: there are none.
        text: what an answer without calls has to be; None: free text.
        field: name of the field that holds it, for error messages.

    Returns:
        None when the answer is free. ``text`` itself where it binds the answer from its first token on: in
        content, and where it spells the channels or has several rules.

    Raises:
        InvalidRequestError: the answer cannot be bound so.
    """
    if text is None and (use is None or not use.has_forced(text)):
        return None
    is_required = use is not None and use.mode is ToolMode.REQUIRED
    is_strict = use is not None and any(tool.is_strict for tool in use.callable_tools)
    spells = text is not None and prompt.channels.are_spelt_by(text)
    rules = None if text is None or is_required or spells else text_rules(text)
    if text is not None and not is_required and rules is None:
        if is_strict or (use is not None and not spells):
            raise InvalidRequestError(
                "tools cannot be enforced together with this grammar of the text; allowed: a JSON schema, "
                "a regular expression or a choice",
                field="tools",
            )
        return text
    if text is not None and use is None and prompt.place is PromptEnd.CONTENT:
        return text
    if prompt.place is PromptEnd.OTHER:
        name = "tool_choice" if is_required else field if use is None else "tools"
        raise InvalidRequestError(
            f"{name} cannot be enforced: the prompt ends {prompt.place.value}; allowed: a prompt that ends "
            "before a header, in reasoning or in content",
            field=name,
        )

    def all_rules(tools: Sequence[Tool]) -> Iterator[str]:
        lark = _ChannelRules(prompt.channels, tools)
        yield from lark.rules(prompt.place, is_required=is_required, has_form=rules is not None)
        yield from rules or ()

    return grammar_of_calls(() if use is None else use.callable_tools, all_rules)


class _ChannelRules:
    def __init__(self, channels: Channels, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._channels = channels

    def rules(self, place: PromptEnd, *, is_required: bool, has_form: bool) -> Iterator[str]:
        """The rules of an answer.

        Args:
            is_required: the answer is a call.
            has_form: its text is of the rule ``answer``.
        """
        start, end = self._token(Marker.START), self._token(Marker.END)
        channel, message = self._token(Marker.CHANNEL), self._token(Marker.MESSAGE)
        kinds = ["call"] if self._tools else []
        body = "answer" if has_form else _TEXT
        begin = "answer" if has_form and place is PromptEnd.CONTENT else self._begin(place, is_required)
        yield f"start: {begin}"
        yield f'next: {start} "{ASSISTANT}"'
        yield f'thought: {channel} "{ChannelName.ANALYSIS}" {message} {_TEXT} {end}'
        yield rf"{_TEXT}: /(.|\n)*/"
        yield f"type: {self._type()}"
        if is_required or has_form:
            yield "rest: (thought next)* last"
        else:
            yield "rest: ((thought | preamble) next)* last"
            yield f'preamble: {channel} "{ChannelName.COMMENTARY}" {message} {_TEXT} {end}'
        if not is_required:
            kinds.append("final")
            yield f'final: {channel} "{ChannelName.FINAL}" type? {message} {body}'
        yield f"last: {' | '.join(kinds)}"
        if self._tools:
            yield "call: " + " | ".join(f"call_{index}" for index in range(len(self._tools)))
            yield from (rule for index, tool in enumerate(self._tools) for rule in self._call(index, tool))

    def _begin(self, place: PromptEnd, is_required: bool) -> str:
        end = self._token(Marker.END)
        if place is PromptEnd.ROLE:
            return "rest"
        if place is PromptEnd.BETWEEN:
            return "next rest"
        if place is PromptEnd.REASONING:
            return f"{_TEXT} {end} next rest"
        return f"{end} next rest" if is_required else f"{_TEXT} ({end} next rest)?"

    def _type(self) -> str:
        if Marker.CONSTRAIN not in self._channels.ids:
            return '" json"'
        constrain = self._token(Marker.CONSTRAIN)
        return f'" json" | " " {constrain} "json" | {constrain} "json"'

    def _call(self, index: int, tool: Tool) -> Iterator[str]:
        """The rules of a tool's call, whose recipient comes before or after the channel."""
        recipient, channel = f" to=functions.{tool.name}", self._token(Marker.CHANNEL)
        first = f'{json.dumps(recipient)} {channel} "{ChannelName.COMMENTARY}"'
        last = f"{channel} {json.dumps(ChannelName.COMMENTARY + recipient)}"
        yield f"call_{index}: ({first} | {last}) type? {self._token(Marker.MESSAGE)} args_{index}"
        yield arguments_rule(f"args_{index}", tool)

    def _token(self, marker: Marker) -> str:
        return f"<[{self._channels.ids[marker]}]>"
