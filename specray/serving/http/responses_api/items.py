"""Turns the input items of the Responses API into the messages of a chat.

What an assistant wrote in one turn comes as several items, its reasoning, its text and its calls; a chat has
them in one message.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from specray.errors import InvalidRequestError
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.messages import TEXTS, required_string, translated_call
from specray.serving.http.chat.parts import answer_of_parts, shows_media, text_of_parts
from specray.serving.validation import out_of_range

_ROLES: Final = ("user", "assistant", "system", "developer")
_KINDS: Final = (
    *("message", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "reasoning"),
)
_OTHER_KINDS: Final = re.compile(
    r"[a-z_]{1,40}_(?:call|call_output|output|list_tools|approval_request|approval_response)|compaction"
)
"""Types of items that tools of other kinds leave in a history, written by another model: left out."""
Message = dict[str, Any]
logger = logging.getLogger(__name__)


def messages_of(value: object, instructions: str | None, images: Images = "auto") -> list[Message]:
    """The messages of an ``input``, after the instructions; without an item, an empty one of a user.

    Args:
        images: what becomes of images, see ``http.images``.

    Raises:
        InvalidRequestError: the input is malformed, or has an item that is not supported.
    """
    opening: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str) or value == []:
        return [*opening, {"role": "user", "content": value or ""}]
    if not isinstance(value, list):
        raise out_of_range("input", value, "a string or a list of items")
    conversation = _Conversation(opening, images)
    for index, item in enumerate(value):
        _read(conversation, f"input[{index}]", item)
    if conversation.left_out:
        logger.info("items of the input left out: %s", ", ".join(dict.fromkeys(conversation.left_out)))
    return conversation.messages or [{"role": "user", "content": ""}]


class _Conversation:
    """Messages as they are put together."""

    def __init__(self, messages: list[Message], images: Images) -> None:
        self.messages = messages
        self.images = images
        self.left_out: list[str] = []
        """Types of items that are left out."""
        self._turn: Message | None = None
        """The assistant's message to which items may still be added."""

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._turn = None

    def add_reasoning(self, text: str) -> None:
        if text:
            self._turn_without("content", "tool_calls")["reasoning_content"] = text

    def add_answer(self, text: str) -> None:
        self._turn_without("content", "tool_calls")["content"] = text

    def add_call(self, call: dict[str, Any]) -> None:
        self._turn_without().setdefault("tool_calls", []).append(call)

    def _turn_without(self, *fields: str) -> Message:
        """The turn that goes on, or a new one where it has one of these fields."""
        if self._turn is None or any(field in self._turn for field in fields):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _read(conversation: _Conversation, where: str, item: object) -> None:
    if not isinstance(item, dict):
        raise out_of_range(where, item, "an object")
    kind = item.get("type") or "message"
    if kind == "message":
        _read_message(conversation, where, item)
    elif kind in ("function_call", "custom_tool_call"):
        # The text that a custom tool gets is no JSON.
        custom = {"arguments": {"input": item.get("input")}} if kind == "custom_tool_call" else {}
        call = translated_call(where, {**item, **custom}, id_key="call_id", arguments_key="arguments")
        conversation.add_call(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        shows = shows_media(conversation.images, is_result=True)
        content = text_of_parts(f"{where}.output", item.get("output"), TEXTS, shows=shows)
        call_id = required_string(f"{where}.call_id", item.get("call_id"))
        conversation.add({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        texts = text_of_parts(f"{where}.content", item.get("content") or [], ("reasoning_text",))
        summary = text_of_parts(f"{where}.summary", item.get("summary") or [], ("summary_text",))
        conversation.add_reasoning(texts or summary)
    elif kind == "item_reference":
        raise InvalidRequestError(
            f"{where}.type is 'item_reference', but the service keeps nothing between calls; "
            "allowed: the item itself",
            field=f"{where}.type",
        )
    elif isinstance(kind, str) and _OTHER_KINDS.fullmatch(kind):
        conversation.left_out.append(kind)
    else:
        raise out_of_range(f"{where}.type", kind, ", ".join(_KINDS))


def _read_message(conversation: _Conversation, where: str, item: dict[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise out_of_range(f"{where}.role", role, ", ".join(_ROLES))
    if role == "assistant":
        answer, reasoning = answer_of_parts(f"{where}.content", content, (*TEXTS, "refusal"))
        conversation.add_reasoning(reasoning)
        conversation.add_answer(answer)
    else:
        shows = shows_media(conversation.images, is_result=False)
        text = text_of_parts(f"{where}.content", content, TEXTS, shows=shows)
        conversation.add({"role": role, "content": text})
