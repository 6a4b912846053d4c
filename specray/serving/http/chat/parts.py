"""Reads content of messages, in one piece or in parts: texts, reasoning, refusals, and what is no text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from specray.errors import shown
from specray.serving.calls.chat_plan import Images
from specray.serving.validation import out_of_range

_MEDIA: Final = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "file",
    "file": "file",
    "input_file": "file",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
}
"""What parts of these types are, which a model of text cannot see."""
_TEXT_KEYS: Final = {"refusal": "refusal"}
"""Where the text of a part is, by its type; others: ``text``."""
_REASONING_KEYS: Final = {
    "thinking": ("thinking",),
    "reasoning": ("reasoning", "text"),
    "reasoning_text": ("text",),
    "redacted_thinking": (),
}
"""Where the text of a part of reasoning is, by its type."""
_MEDIA_TYPE_KEYS: Final = ("media_type", "mimeType", "url", "image_url", "file_data")
"""Where a part, or an object in it, has the type of what it holds."""
_MEDIA_TYPE: Final = re.compile(r"(?:data:)?([a-z]{1,20}/[\w.+-]{1,80})(?:[;,]|\Z)")


def shows_media(images: Images, *, is_result: bool) -> bool:
    """Whether what is no text is shown as a line of text, in a tool's result or elsewhere."""
    return images == "placeholder" or (images == "auto" and is_result)


def text_of_parts(where: str, value: object, kinds: Sequence[str], *, shows: bool = False) -> str:
    """The text of content in one piece or in parts.

    Args:
        where: name of the field.
        kinds: types of parts that hold text.
        shows: images and the like are shown as a line of text.

    Raises:
        InvalidRequestError: it is malformed, or a part is no text.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise out_of_range(where, value, f"a string or a list of parts of type {' or '.join(kinds)}")
    return "".join(
        text_of_part(f"{where}[{index}]", part, kinds, shows=shows) for index, part in enumerate(value)
    )


def answer_of_parts(where: str, value: object, kinds: Sequence[str]) -> tuple[str, str]:
    """Text and reasoning of an assistant's content; arguments and errors as for ``text_of_parts``."""
    if not isinstance(value, list):
        return text_of_parts(where, value, kinds), ""
    text, reasoning = list[str](), list[str]()
    for index, part in enumerate(value):
        place, kind = f"{where}[{index}]", _kind(part)
        if isinstance(part, dict) and kind in _REASONING_KEYS:
            reasoning.append(_reasoning(place, part, _REASONING_KEYS[kind]))
        else:
            text.append(text_of_part(place, part, kinds))
    return "".join(text), "".join(reasoning)


def text_of_part(where: str, part: object, kinds: Sequence[str], *, shows: bool = False) -> str:
    kind = _kind(part)
    if not isinstance(part, dict) or kind not in (*kinds, *_MEDIA):
        raise out_of_range(f"{where}.type", kind, " or ".join(kinds))
    if kind in kinds:
        key = _TEXT_KEYS.get(kind, "text")
        text = part.get(key)
        if not isinstance(text, str):
            raise out_of_range(f"{where}.{key}", text, "a string")
        return text
    if not shows:
        hint = f"{' or '.join(kinds)}, and with http.images: placeholder {kind}, as a line of text"
        raise out_of_range(f"{where}.type", kind, hint)
    return _placeholder(part, _MEDIA[kind])


def _kind(part: object) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if kind is None or isinstance(kind, str) else shown(kind)


def _reasoning(where: str, part: dict[str, Any], keys: Sequence[str]) -> str:
    key = next((key for key in keys if part.get(key) is not None), None)
    return "" if key is None else text_of_parts(f"{where}.{key}", part[key], ("text",))


def _placeholder(part: dict[str, Any], noun: str) -> str:
    inner = [value for name in ("source", "image_url", "file") if isinstance(value := part.get(name), dict)]
    values = [values.get(name) for values in (part, *inner) for name in _MEDIA_TYPE_KEYS]
    found = next(filter(None, (_MEDIA_TYPE.match(value) for value in values if isinstance(value, str))), None)
    kind = noun if found is None else f"{noun} ({found[1]})"
    return f"[{kind}: not shown, this model reads text alone]"
