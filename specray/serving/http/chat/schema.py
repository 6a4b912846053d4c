"""The request body of the chat completions API."""

from __future__ import annotations

from typing import Any, ClassVar

from specray.errors import InvalidRequestError
from specray.serving.http.schemas import Fields, SamplingFields
from specray.serving.validation import RANGES, GenerationOptions, check_range, out_of_range
from specray.tokenization import ChatMessage

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class MessageFields(Fields):
    """One message of a chat."""

    role: str
    content: Any = None
    name: str | None = None


class ChatCompletionRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    field_names: ClassVar[dict[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    messages: list[MessageFields]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self) -> list[ChatMessage]:
        """Returns the conversation. Raises InvalidRequestError for parts that are not text."""
        if not self.messages:
            raise InvalidRequestError("messages is empty; allowed: at least one message", field="messages")
        return [_message(index, message) for index, message in enumerate(self.messages)]

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


def _message(index: int, message: MessageFields) -> ChatMessage:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise out_of_range(f"{where}.role", message.role, ", ".join(_ROLES))
    for name, value in (message.model_extra or {}).items():
        # An empty value asks for nothing: clients send back an answer's message with all its fields.
        if value not in (None, "", [], {}):
            raise InvalidRequestError(f"{where}.{name[:60]} is not supported", field=f"{where}.{name[:60]}")
    return ChatMessage(_ROLES[message.role], _content(f"{where}.content", message.content))


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else None
    if not parts or not all(_is_text_part(part) for part in parts):
        raise out_of_range(where, content, "a string or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
