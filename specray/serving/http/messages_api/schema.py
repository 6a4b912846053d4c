"""The request bodies of the Messages API, and the chats that they ask for."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ConfigDict, Field

from specray.errors import InvalidRequestError
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.messages import MAX_MESSAGES
from specray.serving.http.chat.translation import TranslatedFields, translated_tools, with_variable
from specray.serving.http.extras import check_extras
from specray.serving.http.messages_api.conversation import continues, messages_of
from specray.serving.http.schemas import Fields
from specray.serving.validation import out_of_range

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Kinds of ``tool_choice`` as chats have them."""
_NOT_OFFERED: Final = ("container", "mcp_servers", "context_management", "diagnostics", "prefill")
"""Fields of what the service does not do, unless they are empty."""


class OutputConfigFields(Fields):
    """Form of the answer, and the effort for it."""

    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    format: Any = None


class ThinkingFields(Fields):
    """What is asked of reasoning; its budget is not kept."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class CountTokensRequest(TranslatedFields):
    """The body of /v1/messages/count_tokens."""

    messages: list[Any] = Field(max_length=MAX_MESSAGES)
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfigFields | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    diagnostics: Any = None
    prefill: Any = None
    cache_control: Any = None
    """Ignored: the prefix cache needs no marks."""
    inference_geo: Any = None
    """Ignored."""
    speed: Any = None
    """Ignored."""

    def chat(self, images: Images = "auto") -> dict[str, Any]:
        """Returns the fields of the chat. Raises InvalidRequestError for what cannot be done.

        Args:
            images: what becomes of images, see ``http.images``.
        """
        self._check_others()
        messages = messages_of(self.messages, self.system, images)
        choice, is_parallel = _choice(self.tool_choice)
        chat: dict[str, Any] = {
            **self.passed_on(),
            "messages": messages,
            "continue_final_message": continues(messages) or None,
            "tools": translated_tools(self.tools, _tool),
            "tool_choice": choice,
            "parallel_tool_calls": is_parallel,
        }
        if self.output_config is not None:
            chat["reasoning_effort"] = self.output_config.effort
            chat["response_format"] = _format(self.output_config.format)
        if self.thinking is not None:
            with_variable(chat, "enable_thinking", self._thinks(self.thinking))
        return {name: value for name, value in chat.items() if value is not None}

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def _thinks(self, thinking: ThinkingFields) -> bool:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise out_of_range("thinking.type", thinking.type, "enabled, adaptive or disabled")
        if thinking.display not in (None, "summarized", "omitted"):
            raise out_of_range("thinking.display", thinking.display, "summarized or omitted")
        return thinking.type != "disabled"

    def _check_others(self) -> None:
        for name in _NOT_OFFERED:
            value = getattr(self, name)
            if value and not (name == "context_management" and _keeps_all(value)):
                raise InvalidRequestError(f"{name} is set; allowed: absent or empty", field=name)
        check_extras(self.others, n=1)


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = Field(None, fail_fast=True)

    def chat(self, images: Images = "auto") -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super().chat(images), **{name: value for name, value in own.items() if value is not None}}


def _keeps_all(value: Any) -> bool:
    """Whether a ``context_management`` leaves the conversation as it is; Claude Code sends such a one."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


def _tool(where: str, tool: object) -> Any:
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") not in (None, "custom"):
        return tool
    if tool.get("input_schema") is None:
        raise InvalidRequestError(f"{where}.input_schema is missing", field=f"{where}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(value: Any) -> tuple[Any, bool | None]:
    if value is None:
        return None, None
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in (*_CHOICES, "tool"):
        raise out_of_range("tool_choice.type", kind, f"{', '.join(_CHOICES)} or tool")
    is_single = value.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise out_of_range("tool_choice.disable_parallel_tool_use", is_single, "true or false")
    is_parallel = None if is_single is None else not is_single
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}, is_parallel
    return _CHOICES[kind], is_parallel


def _format(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise out_of_range("output_config.format", value, "an object of type json_schema with a schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": value.get("schema")}}
