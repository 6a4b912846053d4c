"""The request body of the Responses API, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field

from specray.errors import InvalidRequestError
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.chat.translation import TranslatedFields, translated_tools, with_variable
from specray.serving.http.extras import check_extras
from specray.serving.http.responses_api.items import messages_of
from specray.serving.http.schemas import FEW, Fields
from specray.serving.tools.request import is_no_function
from specray.serving.validation import out_of_range

LOGPROBS: Final = "message.output_text.logprobs"
"""Entry of ``include`` that asks for logprobs."""
_INCLUDABLE: Final = (
    LOGPROBS,
    # The text of reasoning comes as it is, so that nothing has to be sent back encrypted.
    "reasoning.encrypted_content",
    # Of tools and content that no answer has here.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_CHOICES: Final = ("none", "auto", "required")


class TextFields(Fields):
    """Form of the answer's text."""

    model_config = ConfigDict(extra="forbid")

    format: Any = None
    verbosity: str | None = None


class ReasoningFields(Fields):
    """What is asked of reasoning; what is not here asks for summaries, which do not exist."""

    effort: str | None = None


class ResponsesChat(ChatCompletionRequest):
    """The chat of one response."""

    field_names: ClassVar[dict[str, str]] = {
        **ChatCompletionRequest.field_names,
        "prompt": "input",
        "max_tokens": "max_output_tokens",
    }


class ResponsesRequest(TranslatedFields):
    """The body of /v1/responses."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Bounds the calls of OpenAI's own tools, of which there are none here."""
    top_logprobs: int | None = None
    include: list[str] | None = Field(None, fail_fast=True)
    stop: Any = None
    stream_options: dict[str, Any] | None = None
    """Accepted and ignored: nothing is padded here, and usage always comes."""
    metadata: Annotated[dict[str, str] | None, FEW] = None
    """Comes back as it is."""
    truncation: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    context_management: Any = None
    client_metadata: Any = None
    """Ignored; Codex tells there who asks."""

    def chat(self, images: Images = "auto") -> dict[str, Any]:
        """Returns the fields of the chat. Raises InvalidRequestError for what cannot be done.

        Args:
            images: what becomes of images, see ``http.images``.
        """
        self._check_state()
        check_extras(self.others, n=1)
        has_logprobs = self._has_logprobs()
        chat = {
            **self.passed_on(),
            "messages": messages_of(self.input, self.instructions, images),
            "max_tokens": self.max_output_tokens,
            "tools": translated_tools(self.tools, _tool),
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "stop": self.stop,
            "logprobs": has_logprobs or None,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
        }
        if self.text is not None:
            chat |= {"response_format": _format(self.text.format), "verbosity": self.text.verbosity}
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
            # Effort at which the model is asked not to reason.
            if self.reasoning.effort == "none":
                with_variable(chat, "enable_thinking", False)
        return {name: value for name, value in chat.items() if value is not None}

    def _check_state(self) -> None:
        kept = {
            "store": self.store,
            "previous_response_id": self.previous_response_id,
            "conversation": self.conversation,
            "background": self.background,
            "prompt": self.prompt,
        }
        for name, value in kept.items():
            if value not in (None, False):
                allowed = "false or absent" if isinstance(value, bool) else "absent"
                raise out_of_range(name, value, f"{allowed}, since the service keeps nothing between calls")
        if self.truncation not in (None, "disabled"):
            raise out_of_range("truncation", self.truncation, "disabled: nothing is left out of the input")
        if self.context_management:
            raise InvalidRequestError(
                "context_management is set; allowed: absent or empty", field="context_management"
            )

    def _has_logprobs(self) -> bool:
        for index, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise out_of_range(f"include[{index}]", name, ", ".join(_INCLUDABLE))
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def _tool(where: str, tool: object) -> Any:
    if not isinstance(tool, dict) or is_no_function(tool):
        return tool
    if tool.get("type") != "function":
        raise out_of_range(f"{where}.type", tool.get("type"), "the name of a type")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _choice(value: Any) -> Any:
    if value is None or value in _CHOICES:
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return _named(value)
    if kind == "allowed_tools":
        tools = value.get("tools")
        if isinstance(tools, list):
            tools = [_named(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
        return {"type": kind, "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    if isinstance(kind, str):
        raise _left_out("tool_choice", kind)
    raise out_of_range("tool_choice", value, "none, auto, required, a function, or allowed_tools")


def _left_out(where: str, kind: str) -> InvalidRequestError:
    return out_of_range(
        f"{where}.type", kind, "function or allowed_tools: tools of other kinds are left out of the request"
    )


def _named(value: object, where: str = "tool_choice") -> Any:
    if not isinstance(value, dict):
        return value
    if is_no_function(value):
        raise _left_out(where, value["type"])
    return {"type": value.get("type"), "function": {"name": value.get("name")}}


def _format(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {
        "type": "json_schema",
        "json_schema": {name: entry for name, entry in value.items() if name != "type"},
    }
