"""Makes the call of a /v1/messages body, a chat whose answer is written as a message, and counts tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.chat.translation import Renames, renamed
from specray.serving.http.edge.admission import Arrived, arrived
from specray.serving.http.events import until_disconnect
from specray.serving.http.messages_api.format import ID_PREFIX, MessageFormat
from specray.serving.http.messages_api.schema import CountTokensRequest, MessagesRequest
from specray.serving.http.openai_api import Call, OpenAiApi
from specray.serving.observe import CallRecord

RENAMES: Final[Renames] = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^stop$"), "stop_sequences"),
)
"""Fields of a chat by what they are called here."""
BodyT = TypeVar("BodyT", bound=CountTokensRequest)


async def messages_call(api: OpenAiApi, arrived: Arrived, record: CallRecord) -> Call:
    body, chat = await api.calls.read(
        partial(_read, MessagesRequest, api, arrived.timed_values), arrived.place
    )
    with renamed(RENAMES):
        return await api.chat(
            chat,
            arrived.place,
            record,
            prefix=ID_PREFIX,
            make_format=partial(MessageFormat, shows_thinking=body.shows_thinking),
        )


def add_count_route(app: FastAPI, api: OpenAiApi) -> None:
    async def counted(call: Arrived) -> int:
        _, chat = await api.calls.read(partial(_read, CountTokensRequest, api, call.values), call.place)
        async with call.place.in_time():
            await api.calls.adapter_of(chat.model)
            with renamed(RENAMES):
                return len(await api.encode_chat(chat, call.place))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> JSONResponse:
        count = await until_disconnect(request.receive, counted(arrived(request)))
        return JSONResponse({"input_tokens": count})


def _read(
    schema: type[BodyT], api: OpenAiApi, values: Callable[[], object]
) -> tuple[BodyT, ChatCompletionRequest]:
    body = api.parse(schema, values())
    chat = body.chat(api.images)
    with renamed(RENAMES):
        return body, api.parse(ChatCompletionRequest, chat)
