"""The request body of the chat completions API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specray.errors import InvalidRequestError
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.messages import MAX_MESSAGES, MessageFields, read_messages
from specray.serving.http.schemas import Fields, Nested, SamplingFields
from specray.serving.tools.request import ToolUse, is_no_function, parse_tools
from specray.serving.validation import RANGES, GenerationOptions, check_range
from specray.tokenization import ChatMessage


class FunctionFields(Fields):
    """A function of a tool; ``parse_tools`` checks it."""

    name: Any = None
    description: Any = None
    parameters: Any = None
    strict: Any = None


class ToolFields(Fields):
    """A tool; ``parse_tools`` checks it."""

    type: Any = None
    name: Any = None
    """Name of a tool that is no function, which is left out; ``custom`` may hold it, too."""
    custom: Any = None
    function: Annotated[Any, Nested(FunctionFields)] = None


class ChatCompletionRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    field_names: ClassVar[dict[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    messages: list[MessageFields] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[Any, Nested(ToolFields)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template, where it knows one of this name."""
    verbosity: str | None = None
    """The same."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of this model's chat template."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message. Default: not with ``continue_final_message``."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message."""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self, images: Images = "auto") -> list[ChatMessage]:
        """Returns the conversation. Raises InvalidRequestError for parts that are not text.

        Args:
            images: what becomes of images, see ``http.images``.
        """
        return read_messages(self.messages, images)

    def tool_use(self) -> ToolUse | None:
        return parse_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def left_out_tools(self) -> tuple[str, ...]:
        """Tools that are no functions, which the service goes without, as a header names them."""
        return tuple(dict.fromkeys(_shown(tool) for tool in self.tools or () if is_no_function(tool)))

    def template_variables(self) -> dict[str, Any]:
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        own = {name: value for name, value in given.items() if value is not None}
        return {**own, **(self.chat_template_kwargs or {})}

    def adds_generation_prompt(self) -> bool:
        """Returns whether the prompt ends where an answer begins. Raises InvalidRequestError."""
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message are both true; allowed: one of them",
                field="continue_final_message",
            )
        return (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )

    def options(self) -> GenerationOptions:
        if self.top_logprobs is not None:
            check_range(RANGES["top_logprobs"], "top_logprobs", self.top_logprobs)
            if not self.logprobs:
                raise InvalidRequestError(
                    "top_logprobs is set without logprobs; allowed: only with logprobs true",
                    field="top_logprobs",
                )
        return super().options()

    def max_tokens_field(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; allowed: one of them", field="max_tokens"
            )
        return "max_completion_tokens", self.max_completion_tokens


def _shown(tool: Mapping[str, Any]) -> str:
    inner = tool.get(tool["type"])
    words = (tool["type"], tool.get("name", inner.get("name") if isinstance(inner, dict) else None))
    kept = [word[:64] for word in words if isinstance(word, str) and word]
    return ":".join(re.sub(r"[^A-Za-z0-9_.-]", "_", word) for word in kept)
