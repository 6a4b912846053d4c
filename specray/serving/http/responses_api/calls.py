"""Makes the call of a /v1/responses body: a chat whose answer is written as a response."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from specray.serving.http.chat.translation import Renames, renamed
from specray.serving.http.edge.admission import Arrived
from specray.serving.http.openai_api import Call, OpenAiApi
from specray.serving.http.responses_api.format import ID_PREFIX, ResponseObjectFormat
from specray.serving.http.responses_api.schema import ResponsesChat, ResponsesRequest
from specray.serving.observe import CallRecord

RENAMES: Final[Renames] = (
    (re.compile(r"^tool_choice\.allowed_tools\.tools(\[\d+\])\.function"), r"tool_choice.tools\1"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^messages"), "input"),
)
"""Fields of a chat by what they are called here."""


async def responses_call(api: OpenAiApi, arrived: Arrived, record: CallRecord) -> Call:
    def read() -> tuple[ResponsesRequest, ResponsesChat]:
        body = api.parse(ResponsesRequest, arrived.timed_values())
        chat = body.chat(api.images)
        with renamed(RENAMES):
            return body, api.parse(ResponsesChat, chat)

    body, chat = await api.calls.read(read, arrived.place)
    with renamed(RENAMES):
        return await api.chat(
            chat,
            arrived.place,
            record,
            prefix=ID_PREFIX,
            make_format=partial(ResponseObjectFormat, body),
        )
