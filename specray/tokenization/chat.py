"""Renders conversations by a model's chat template."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specray.errors import ConfigError, InvalidRequestError
from specray.tokenization.templates.call_arguments import CallArguments
from specray.tokenization.templates.probes import TemplateProbe
from specray.tokenization.templates.time_limit import MAX_RENDER_S, run_limited

_TESTS_FOR_NONE: Final = re.compile(
    r"(?<![a-z_])content['\"]?\]?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.IGNORECASE
)
"""Sign of a template that tells a message without content from one with empty content."""
_WANTS_SHORT_IDS: Final = re.compile(r"length\s*(?:!=|<|>|\bne\b)\s*9\b")
"""Sign of a template that refuses ids of calls of another length than nine characters, such as Mistral's."""
_SHORT_ID_LEN: Final = 9
_MAX_SOURCE_CHARS: Final = 1_000_000
"""Characters of a template; the longest in use have about 50,000."""
_RESERVED: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
"""Names that a request's own template variables may not have."""

Marker = Callable[[Any], Any]
"""Puts marks around control tokens of JSON values, see ``control_tokens``."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str | None
    """None: an assistant's message that only calls tools."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, as templates know them: ``name``, ``tool_calls`` (with the arguments as objects, or as
    text that is no object's), ``tool_call_id``, ``reasoning_content``."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template receives with the conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as OpenAI's API has them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of this model's template, such as ``enable_thinking``."""
    adds_generation_prompt: bool = True
    """The text ends where the assistant's answer begins."""
    continues_final_message: bool = False
    """The text ends within the last message."""
    allows_special_tokens: bool = False
    """Text of messages may spell control tokens."""


class ChatTemplate:
    """A model's chat template. Safe to use from several threads.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token``, ``eos_token`` ..., as templates name them.
        tool_source: Jinja source for requests with tools; default: the same.

    Raises:
        ConfigError: a source has more than a million characters.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        for text in (source, tool_source or ""):
            if len(text) > _MAX_SOURCE_CHARS:
                raise ConfigError(
                    f"the chat template has {len(text)} characters; allowed: at most {_MAX_SOURCE_CHARS}"
                )
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._probe = TemplateProbe(source, self._special_tokens)
        self._tool_probe = (
            self._probe if self.tool_source == source else TemplateProbe(self.tool_source, special_tokens)
        )

    @property
    def all_sources(self) -> str:
        """The Jinja sources of requests with and without tools, to look for what the model writes."""
        return self.source + self.tool_source

    @property
    def reads_tools(self) -> bool:
        """False: the template does not look at ``tools``, so that the model would not know them."""
        return self._tool_probe.reads_tools

    def turn_end(self, names: Collection[str]) -> str | None:
        """The special token that ends the assistant's turn, one of these names; None: there is none."""
        return self._probe.turn_end(names)

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions, marked: Marker) -> str:
        """The text of a conversation.

        Args:
            marked: applied to all strings that a request brings.

        Raises:
            InvalidRequestError: the template refuses the conversation, or a variable's name is taken.
        """
        taken = options.variables.keys() & (_RESERVED | self._special_tokens.keys())
        if taken:
            name = f"chat_template_kwargs.{min(taken)}"
            raise InvalidRequestError(f"{name} is set; allowed: other variables of the template", field=name)
        source, probe = (self.tool_source, self._tool_probe) if options.tools else (self.source, self._probe)
        if not probe.keeps_system_messages:
            messages = with_one_system_message(messages)
        variables = {
            **self._special_tokens,
            **marked(dict(options.variables)),
            "chat_template": source,
            "tools": marked(_tools(options.tools, probe)) if options.tools else None,
            "add_generation_prompt": options.adds_generation_prompt,
            "continue_final_message": options.continues_final_message,
        }
        fields = probe.turns.fitted([self._fields(message, source) for message in messages])
        return self._render([marked(entry) for entry in fields], variables)

    def _render(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        problem: Exception | None = None
        found: str | None = None
        arguments = CallArguments(conversation)
        for attempt in arguments.attempts():
            try:
                # The compiled template is shared by the threads of requests.
                render = functools.partial(render_jinja_template, [attempt], **variables)
                with self._lock:
                    rendered = str(run_limited(render, MAX_RENDER_S)[0][0])
            except TimeoutError as error:
                problem = error
                break
            except (
                TemplateError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
                RecursionError,
            ) as error:
                problem = problem or error
                continue
            if arguments.has_all(rendered):
                return arguments.filled(rendered)
            found = found or arguments.filled(rendered)
        if found is not None:
            return found  # This template writes nothing of calls.
        raise InvalidRequestError(
            f"messages: the model's chat template refuses them: {str(problem)[:200]}",
            field="messages",
        )

    def _fields(self, message: ChatMessage, source: str) -> dict[str, Any]:
        content = message.content
        if content is None and not _TESTS_FOR_NONE.search(source):
            content = ""
        fields = {"role": message.role, "content": content, **message.fields}
        return _with_short_ids(fields) if _WANTS_SHORT_IDS.search(source) else fields


def with_one_system_message(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The conversation with later system messages joined to the first, at its start."""
    system = [message for message in messages if message.role == "system"]
    if not system or system == [messages[0]]:
        return messages
    joined = "\n\n".join(message.content for message in system if message.content)
    others = (message for message in messages if message.role != "system")
    return [replace(system[0], content=joined), *others]


def _tools(tools: Sequence[Mapping[str, Any]], probe: TemplateProbe) -> list[Mapping[str, Any]]:
    """The tools as the template takes them."""
    if not probe.takes_all_defaults:
        tools = with_text_defaults(tools)
    if not probe.tool_defaults:
        return list(tools)
    return [{**tool, "function": _with_fields(tool["function"], probe.tool_defaults)} for tool in tools]


def _with_fields(function: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    missing = {name: value for name, value in defaults.items() if function.get(name) is None}
    return {**function, **missing}


def _with_short_ids(fields: dict[str, Any]) -> dict[str, Any]:
    if "tool_call_id" in fields:
        fields["tool_call_id"] = _short_id(fields["tool_call_id"])
    if "tool_calls" in fields:
        fields["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if "id" in call else call for call in fields["tool_calls"]
        ]
    return fields


def _short_id(call_id: str) -> str:
    """The id itself, or one of the right length that equal ids share."""
    if len(call_id) == _SHORT_ID_LEN and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LEN]


_CHOICES: Final = ("enum", "oneOf")
"""Keywords next to which some templates join the default to a text."""


def with_text_defaults(value: Any) -> Any:
    """A schema, or what contains some, whose defaults of choices are JSON text where they are no text."""
    if isinstance(value, list | tuple):
        return [with_text_defaults(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    schema = {name: with_text_defaults(entry) for name, entry in value.items()}
    has_choices = any(isinstance(value.get(name), list) for name in _CHOICES)
    if has_choices and "default" in value and not isinstance(value["default"], str):
        schema["default"] = json.dumps(value["default"], ensure_ascii=False)
    return schema
