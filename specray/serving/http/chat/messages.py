"""Reads the messages of a chat: roles, text in one piece or in parts, calls of tools and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import from_json

from specray.errors import InvalidRequestError
from specray.request_options import Range
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.parts import answer_of_parts, shows_media, text_of_parts
from specray.serving.http.schemas import Fields
from specray.serving.validation import check_range, out_of_range
from specray.tokenization import ChatMessage

MAX_MESSAGES: Final = 8192
"""Messages of a conversation."""
MAX_CALLS: Final = 1024
"""Calls of tools in one message."""
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles as templates know them, by their names in requests."""
TEXTS: Final = ("text", "input_text", "output_text")
"""Types of parts that are text."""
_UNSUPPORTED: Final = ("function_call", "audio")
_EMPTY: Final[tuple[object, ...]] = (None, "", [], {})
"""Values that ask for nothing."""


class MessageFields(Fields):
    """One message of a chat."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same as ``reasoning_content``, as vLLM has it."""
    refusal: Any = None
    """Text of an assistant's message without content."""
    function_call: Any = None
    """Not supported; ``tool_calls`` has taken its place."""
    audio: Any = None
    """Not supported."""
    type: Any = None
    """Content type that some clients send beside the content."""


def read_messages(messages: Sequence[MessageFields], images: Images = "auto") -> list[ChatMessage]:
    """The conversation, with arguments of calls as objects, or as text that is no object's.

    Args:
        images: what becomes of parts that are images and the like.

    Raises:
        InvalidRequestError: there is no message, or one has what it may not have, or parts that are not text.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; allowed: at least one message", field="messages")
    return [_message(f"messages[{index}]", message, images) for index, message in enumerate(messages)]


def _message(where: str, message: MessageFields, images: Images) -> ChatMessage:
    if message.role not in _ROLES:
        raise out_of_range(f"{where}.role", message.role, ", ".join(_ROLES))
    if message.type not in (None, "text", "message"):
        raise out_of_range(f"{where}.type", message.type, "text or absent")
    extras = {name: getattr(message, name) for name in _UNSUPPORTED} | (message.model_extra or {})
    for name, value in extras.items():
        # Clients send back an answer's message with all its fields.
        if value not in _EMPTY:
            raise InvalidRequestError(f"{where}.{name[:60]} is not supported", field=f"{where}.{name[:60]}")
    calls = _calls(f"{where}.tool_calls", message)
    content, thinking = _content(f"{where}.content", message, calls, images)
    fields = {
        "name": message.name,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning or thinking,
    }
    return ChatMessage(
        _ROLES[message.role], content, {name: value for name, value in fields.items() if value}
    )


def _content(
    where: str, message: MessageFields, calls: list[dict[str, Any]], images: Images
) -> tuple[str | None, str]:
    content = message.content
    if message.role != "assistant":
        shows = shows_media(images, is_result=message.role == "tool")
        return text_of_parts(where, content, TEXTS, shows=shows), ""
    if content in (None, []):
        content = message.refusal if message.refusal not in _EMPTY else None if calls else ""
        where = where.replace("content", "refusal")
    return (None, "") if content is None else answer_of_parts(where, content, (*TEXTS, "refusal"))


def _calls(where: str, message: MessageFields) -> list[dict[str, Any]]:
    calls = message.tool_calls
    if calls in _EMPTY:
        return []
    if message.role != "assistant":
        raise InvalidRequestError(f"{where} is set; allowed: only in messages of assistant", field=where)
    if not isinstance(calls, list):
        raise out_of_range(where, calls, "a list of calls of functions")
    check_range(Range(0, MAX_CALLS), where, len(calls), what=f"number of calls in {where}")
    return [_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") not in ("function", "custom"):
        raise out_of_range(where, call, "an object of type function or custom")
    is_custom = call.get("type") == "custom"
    call_id, function = call.get("id"), call.get("custom" if is_custom else "function")
    if call_id is not None and not isinstance(call_id, str):
        raise out_of_range(f"{where}.id", call_id, "a string")
    if not isinstance(function, dict):
        raise out_of_range(f"{where}.{call.get('type', 'function')}", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise out_of_range(f"{where}.function.name", name, "a name")
    # The text that a custom tool gets is no JSON.
    arguments = {"input": function.get("input")} if is_custom else _arguments(function.get("arguments"))
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def translated_call(where: str, call: dict[str, Any], *, id_key: str, arguments_key: str) -> dict[str, Any]:
    """A call as chats have it, of an API that names its id and its arguments in its own way.

    Raises:
        InvalidRequestError: it has no name or no id.
    """
    function = {
        "name": required_string(f"{where}.name", call.get("name")),
        "arguments": _arguments(call.get(arguments_key)),
    }
    call_id = required_string(f"{where}.{id_key}", call.get(id_key))
    return {"id": call_id, "type": "function", "function": function}


def required_string(where: str, value: object) -> str:
    """The string itself. Raises InvalidRequestError for anything else, and for an empty one."""
    if not isinstance(value, str) or not value:
        raise out_of_range(where, value, "a string of at least one character")
    return value


def _arguments(value: object) -> dict[str, Any] | str:
    """The arguments of a call: an object, or text that is no object's, as it came.

    Args:
        value: an object or its JSON text, as it should be, or what else a call has become.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        # Unlike the standard library's parser, this one refuses lone surrogates and deep nesting.
        arguments = from_json(text) if text.strip() else {}
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
