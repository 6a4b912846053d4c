"""Writes the assistant's messages of a history in the form that a chat template takes.

Templates differ in whether they take content besides reasoning in a message that calls tools, and in how many
calls a message may have. What a template does is found out by small conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Returns what a template writes; None: it refuses the conversation."""

_REASONING: Final = "reasoning_content"
"""Field for reasoning; transformers gives a template the text as ``thinking``, too."""
_THOUGHT: Final = dict.fromkeys((_REASONING, "thinking"), "probe-thought")
_NAMES: Final = ("probe_one", "probe_two")
_IDS: Final = ("probe0001", "probe0002")
"""Ids of calls, of the length that Mistral's templates ask for."""


class AssistantTurns:
    """How one template takes the assistant's messages; each answer is found at first need.

    Args:
        render: the template.
    """

    def __init__(self, render: Render) -> None:
        self._render = render

    def fitted(self, messages: list[Message]) -> list[Message]:
        """The conversation as the template takes it; messages as they are where it does not mind."""
        fitted = []
        for message in messages:
            has_both = bool(message.get(_REASONING) and message["content"])
            if has_both and message.get("tool_calls") and not self._takes_content_beside_reasoning:
                # Its one place is for what led to the call.
                message = {**message, "content": ""}
            fitted.append(message)
        has_several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
        return fitted if not has_several or self._takes_several_calls else list(_with_single_calls(fitted))

    @functools.cached_property
    def _takes_content_beside_reasoning(self) -> bool:
        return bool(self._written({**_THOUGHT, "content": "probe-content"})) or not self._written(_THOUGHT)

    @functools.cached_property
    def _takes_several_calls(self) -> bool:
        return _NAMES[1] in self._written({}, num_calls=2) or _NAMES[0] not in self._written({})

    def _written(self, fields: Mapping[str, str], *, num_calls: int = 1) -> str:
        user = {"role": "user", "content": "probe-question"}
        for arguments in ({"probe": "a"}, '{"probe": "a"}'):
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, call_id in list(zip(_NAMES, _IDS, strict=True))[:num_calls]
            ]
            assistant = {"role": "assistant", "content": "", "tool_calls": calls, **fields}
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "probe-result"} for call in calls
            ]
            text = self._render([user, assistant, *results])
            if text is not None:
                return text
        return ""


def _with_single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = list[Message]()
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": message["role"], "content": ""}
            yield {**first, "tool_calls": [call]}
            is_last = index == len(calls) - 1
            for result in results[:] if is_last else _result(results, call):
                results.remove(result)
                yield result


def _result(results: Sequence[Message], call: Mapping[str, Any]) -> list[Message]:
    named = [result for result in results if "id" in call and result.get("tool_call_id") == call["id"]]
    return (named or [result for result in results if "tool_call_id" not in result])[:1]
