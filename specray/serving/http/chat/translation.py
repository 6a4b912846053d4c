"""Translates other APIs into chats: fields that go on as they are, texts of parts, and names in errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic import create_model

from specray.errors import InvalidRequestError
from specray.request_options import OPTIONS
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.schemas import Fields
from specray.serving.tools.request import MAX_TOOLS

_OTHERWISE: Final = ("max_tokens", "stop", "logprobs", "prompt_logprobs", "prediction", "grammar")
"""Options that these APIs have otherwise, or not at all."""
_PASSED_ON: Final = (
    *("model", "stream", "slo", "speculation", "return_speculation_metrics", "chat_template_kwargs"),
    *(name for name, option in OPTIONS.items() if option.path == name and name not in _OTHERWISE),
)
"""Fields of a chat that mean the same in every API here."""

_CHAT_FIELDS: Final = {name: ChatCompletionRequest.model_fields[name] for name in _PASSED_ON}

_PassedOn = create_model(  # type: ignore[call-overload]
    "_PassedOn",
    __base__=Fields,
    **{name: (field.annotation, field) for name, field in _CHAT_FIELDS.items()},
)

Renames = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of a chat's field names, each with what the field is called in another API."""


class TranslatedFields(_PassedOn):
    """A body of an API that is answered by a chat."""

    temperature: float | None = None
    top_p: float | None = None
    structured_outputs: Any = None
    """A grammar of the answer, as chats take it among the fields that their schema does not have."""

    def passed_on(self) -> dict[str, Any]:
        """Returns the fields that the chat has under the same names."""
        values = {name: getattr(self, name) for name in (*_PASSED_ON, "structured_outputs")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def others(self) -> Mapping[str, Any]:
        """The fields that the schema does not have."""
        return self.model_extra or {}


def with_variable(chat: dict[str, Any], name: str, value: object) -> None:
    """Sets a variable of the chat template, unless the request itself sets it."""
    chat["chat_template_kwargs"] = {name: value, **(chat.get("chat_template_kwargs") or {})}


def translated_tools(value: Any, translate: Callable[[str, object], Any]) -> Any:
    """The tools as chats have them; a chat refuses what is no list, or too long a one.

    Args:
        translate: one tool, by the name of its field.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        return value
    return [translate(f"tools[{index}]", tool) for index, tool in enumerate(value)]


@contextmanager
def renamed(renames: Renames) -> Iterator[None]:
    """Gives the fields in errors of a chat the names of the API by which they came."""
    try:
        yield
    except InvalidRequestError as error:
        own = error.field or ""
        name = next((pattern.sub(text, own) for pattern, text in renames if pattern.search(own)), own)
        if name == own:
            raise
        raise type(error)(str(error).replace(own, name, 1), field=name) from None
