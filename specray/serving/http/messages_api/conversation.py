"""Turns the messages of the Messages API, with their blocks, into the messages of a chat."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from specray.errors import InvalidRequestError
from specray.serving.calls.chat_plan import Images
from specray.serving.http.chat.messages import required_string, translated_call
from specray.serving.http.chat.parts import shows_media, text_of_part, text_of_parts
from specray.serving.validation import out_of_range

_KINDS: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Types of blocks by role."""
_OF_SERVERS: Final = re.compile(
    r"(?:server|mcp)_tool_use|[a-z_]{1,40}_tool_result|compaction|container_upload|fallback"
)
"""Types of blocks that Anthropic's own tools leave in a history: left out."""
_BILLING: Final = "x-anthropic-billing-header"
"""Begins the block that Claude Code puts before its instructions: other text with each request, for Anthropic
alone, after which nothing would be found in a prefix cache."""
Message = dict[str, Any]
logger = logging.getLogger(__name__)


def messages_of(messages: list[Any], system: object, images: Images = "auto") -> list[Message]:
    """The messages of a chat.

    Args:
        images: what becomes of images, see ``http.images``.

    Raises:
        InvalidRequestError: a message is malformed, or has a block that is not supported.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; allowed: at least one message", field="messages")
    instructions = "" if system is None else _instructions(system)
    opening = [{"role": "system", "content": instructions}] if instructions else []
    read = [_read(f"messages[{index}]", message, images) for index, message in enumerate(messages)]
    return [*opening, *(message for entry in read for message in entry)]


def continues(messages: list[Message]) -> bool:
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _instructions(system: object) -> str:
    if isinstance(system, list):
        texts = [text_of_part(f"system[{index}]", block, ("text",)) for index, block in enumerate(system)]
        return "".join(text for text in texts if not text.startswith(_BILLING))
    return text_of_parts("system", system, ("text",))


def _read(where: str, message: object, images: Images) -> list[Message]:
    if not isinstance(message, dict):
        raise out_of_range(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _KINDS:
        raise out_of_range(f"{where}.role", role, ", ".join(_KINDS))
    where = f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise out_of_range(where, content, "a string or a list of blocks")
    content = _without_servers(content)
    if role == "system":
        return [{"role": role, "content": text_of_parts(where, content, _KINDS[role])}]
    if role == "user":
        return _of_user(where, content, images)
    blocks = [_block(f"{where}[{index}]", block, role) for index, block in enumerate(content)]
    return [_of_assistant(where, blocks)]


def _without_servers(blocks: list[Any]) -> list[Any]:
    kinds = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    left_out = [kind for kind in kinds if isinstance(kind, str) and _OF_SERVERS.fullmatch(kind)]
    if left_out:
        logger.info("blocks of messages left out: %s", ", ".join(dict.fromkeys(left_out)))
    return [block for block, kind in zip(blocks, kinds, strict=True) if kind not in left_out]


def _block(where: str, block: object, role: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind not in _KINDS[role]:
        raise out_of_range(f"{where}.type", kind, f"{', '.join(_KINDS[role])} in messages of {role}")
    return block


def _of_user(where: str, blocks: list[Any], images: Images) -> list[Message]:
    """Results of tools are messages of their own; text between them is one message."""
    messages = list[Message]()
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content, shows = block.get("content"), shows_media(images, is_result=True)
            text = (
                "" if content is None else text_of_parts(f"{place}.content", content, ("text",), shows=shows)
            )
            call_id = required_string(f"{place}.tool_use_id", block.get("tool_use_id"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        text = text_of_part(place, block, _KINDS["user"], shows=shows_media(images, is_result=False))
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _of_assistant(where: str, blocks: list[dict[str, Any]]) -> Message:
    content, thinking, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block["type"] == "text":
            content.append(text_of_part(place, block, ("text",)))
        elif block["type"] == "thinking":
            thinking.append(text_of_parts(f"{place}.thinking", block.get("thinking") or "", ("text",)))
        elif block["type"] == "tool_use":
            calls.append(translated_call(place, block, id_key="id", arguments_key="input"))
    message: Message = {"role": "assistant", "content": "".join(content) or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    return message
