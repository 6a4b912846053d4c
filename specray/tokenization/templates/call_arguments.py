"""Writes the arguments of a history's calls in the form that a template takes: objects, or text.

Arguments that are no JSON object, such as those of a call that was cut, go into the prompt as they are: the
template is given a name for each, whose place in what it writes the text takes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Conversation = list[dict[str, Any]]

_NULL: Final = "null"
_FIELD: Final = "arguments"
"""Name of the only argument by which a template gets a text that wants names and values."""


class CallArguments:
    """The calls of one conversation.

    Args:
        conversation: messages as templates know them; arguments are objects, or text that is no object's.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._key = secrets.token_hex(8)
        self._texts: list[str] = []
        """Texts that are no objects, by their number."""
        self._is_wrapped = False

    def attempts(self) -> Iterator[Conversation]:
        """The conversation in each form that a template may take, the likeliest first."""
        if not any(message.get("tool_calls") for message in self._conversation):
            yield self._conversation
            return
        yield from self._forms()
        if any(message.get("content") is None for message in self._conversation):
            # Not every template that asks whether there is content can do without.
            self._conversation = [
                {**message, "content": message.get("content") or ""} for message in self._conversation
            ]
            yield from self._forms()

    def _forms(self) -> Iterator[Conversation]:
        self._is_wrapped = False
        yield self._with(self._as_it_is)
        yield self._with(self._as_text)
        if self._texts:
            self._is_wrapped = True
            yield self._with(self._as_object)

    def has_all(self, rendered: str) -> bool:
        """Whether what a template wrote of the latest attempt has every text."""
        return all(
            self._name(index) in rendered
            for index, text in enumerate(self._texts)
            if not (self._is_wrapped and text == _NULL)
        )

    def filled(self, rendered: str) -> str:
        """What a template wrote of the latest attempt, with the texts."""
        for index, text in enumerate(self._texts):
            name = self._name(index)
            quoted = json.dumps(text, ensure_ascii=False) if self._is_wrapped else text
            rendered = rendered.replace(f'"{name}"', quoted).replace(name, text)
        return rendered

    def _with(self, form: Callable[[Any], Any]) -> Conversation:
        self._texts = []
        return [
            {**message, "tool_calls": [_with_arguments(call, form) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in self._conversation
        ]

    def _as_it_is(self, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        self._texts.append(arguments)
        return self._name(len(self._texts) - 1)

    def _as_text(self, arguments: Any) -> str:
        if isinstance(arguments, str):
            return str(self._as_it_is(arguments))
        return json.dumps(arguments, ensure_ascii=False)

    def _as_object(self, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        name = self._as_it_is(arguments)
        return {} if arguments == _NULL else {_FIELD: name}

    def _name(self, index: int) -> str:
        return f"specray-{self._key}-{index}-arguments"


def _with_arguments(call: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}
