"""Renders conversations by a model's chat template."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specray.errors import InvalidRequestError

_TESTS_FOR_NONE: Final = re.compile(r"content['\"]?\]?\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.IGNORECASE)
"""Sign of a template that tells a message without content from one with empty content."""
_WANTS_SHORT_IDS: Final = re.compile(r"length\s*(?:!=|<|>|\bne\b)\s*9\b")
"""Sign of a template that refuses ids of calls of another length than nine characters, such as Mistral's."""
_SHORT_ID_LEN: Final = 9
_MAX_ERROR_LEN: Final = 200
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
    """Further fields, as templates know them: ``name``, ``tool_calls`` (with the arguments as objects),
    ``tool_call_id``, ``reasoning_content``."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template is told beside the conversation."""

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
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()

    @functools.cached_property
    def reads_tools(self) -> bool:
        """False: the template does not look at ``tools``, so that the model would not know them."""
        from jinja2 import meta

        return "tools" in meta.find_undeclared_variables(_parsing_environment().parse(self.tool_source))

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
        source = self.tool_source if options.tools else self.source
        variables = {
            **self._special_tokens,
            **marked(dict(options.variables)),
            "chat_template": source,
            "tools": marked(list(options.tools)) if options.tools else None,
            "add_generation_prompt": options.adds_generation_prompt,
            "continue_final_message": options.continues_final_message,
        }
        return self._render([marked(self._fields(message, source)) for message in messages], variables)

    def _render(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        problem: Exception | None = None
        for attempt in _attempts(conversation):
            try:
                # The compiled template is shared by the threads of requests.
                with self._lock:
                    rendered = render_jinja_template([attempt], **variables)
                return str(rendered[0][0])
            except (
                TemplateError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
                RecursionError,
            ) as error:
                problem = problem or error
        raise InvalidRequestError(
            f"messages: the model's chat template refuses them: {str(problem)[:_MAX_ERROR_LEN]}",
            field="messages",
        )

    def _fields(self, message: ChatMessage, source: str) -> dict[str, Any]:
        content = message.content
        if content is None and not _TESTS_FOR_NONE.search(source):
            content = ""
        fields = {"role": message.role, "content": content, **message.fields}
        return _with_short_ids(fields) if _WANTS_SHORT_IDS.search(source) else fields


def _attempts(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation with arguments of calls as objects, as most templates want them, and then as text."""
    yield conversation
    if any(message.get("tool_calls") for message in conversation):
        yield [
            {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in conversation
        ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


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


@functools.cache
def _parsing_environment() -> Any:
    """Parses the templates that transformers renders; renders nothing."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """Reads ``{% generation %}``, with which templates name the assistant's part."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own form.

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(  # Nothing is rendered.
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
