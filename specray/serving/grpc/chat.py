"""Reads the conversation of a Generate call, as the body of a chat that HTTP would have brought."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from specray.errors import InvalidRequestError
from specray.rpc.inference.types import GenerateParams, Message
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.schemas import parse_request
from specray.serving.validation import out_of_range

_ONLY_IN_CHATS: Final = ("tools", "chat_template_kwargs")
"""Names of fields that mean something to a chat template alone."""


def read_chat(params: GenerateParams) -> ChatCompletionRequest | None:
    """Returns what of the call is told to the chat template; None: the prompt is no conversation.

    Raises:
        InvalidRequestError: there are messages and another prompt, a field of chats without messages, or a
            field that is not the JSON text that it has to be.
    """
    if not params.messages:
        for name in _ONLY_IN_CHATS:
            if getattr(params, name):
                raise InvalidRequestError(
                    f"{name} is set without messages; allowed: only with messages", field=name
                )
        return None
    other = "text" if params.text is not None else "tokens" if params.token_ids is not None else None
    if other is not None:
        raise InvalidRequestError(
            f"messages are set together with {other}; allowed: one of text, tokens and messages",
            field="messages",
        )
    body: dict[str, Any] = {
        "messages": [_message(f"messages[{index}]", entry) for index, entry in enumerate(params.messages)]
    }
    for name in _ONLY_IN_CHATS:
        if text := getattr(params, name):
            body[name] = _json(name, text)
    return parse_request(ChatCompletionRequest, body)


def _message(where: str, message: Message) -> dict[str, Any]:
    calls = message.tool_calls
    fields = {
        "name": message.name,
        "tool_calls": _json(f"{where}.tool_calls", calls) if calls else None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    given = {name: value for name, value in fields.items() if value}
    return {"role": message.role, "content": message.content, **given}


def _json(where: str, text: str) -> object:
    try:
        return from_json(text)
    except ValueError:
        raise out_of_range(where, text, "JSON text, as the field has it over HTTP") from None
