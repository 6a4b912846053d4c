"""Makes the call of a /v1/messages body, a chat whose answer is written as a message, and counts tokens."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from specray.config.live import LiveConfig
from specray.serving.admission.api_keys import Caller
from specray.serving.http.body import read_json
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.chat.translation import Renames, renamed
from specray.serving.http.events import until_disconnect
from specray.serving.http.messages_api.format import ID_PREFIX, MessageFormat
from specray.serving.http.messages_api.schema import CountTokensRequest, MessagesRequest
from specray.serving.http.openai_api import Call, OpenAiApi
from specray.serving.http.routes.tokens import MAX_TOKENIZING_CALLS, turn
from specray.serving.limits import ServiceLimits
from specray.serving.observe import CallRecord
from specray.serving.validation import check_model

RENAMES: Final[Renames] = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^stop$"), "stop_sequences"),
)
"""Fields of a chat by what they are called here."""


async def messages_call(api: OpenAiApi, values: object, caller: Caller, record: CallRecord) -> Call:
    """Makes the call. Raises InvalidRequestError, EngineLostError."""
    body = api.parse(MessagesRequest, values)
    chat = body.chat(api.images)
    with renamed(RENAMES):
        return await api.chat(
            api.parse(ChatCompletionRequest, chat),
            caller,
            record,
            prefix=ID_PREFIX,
            make_format=partial(MessageFormat, shows_thinking=body.shows_thinking),
        )


def add_count_route(app: FastAPI, api: OpenAiApi, limits: ServiceLimits, *, config: LiveConfig) -> None:
    """Adds /v1/messages/count_tokens."""
    turns = asyncio.Semaphore(MAX_TOKENIZING_CALLS)

    async def counted(values: object) -> int:
        body = api.parse(CountTokensRequest, values)
        chat = api.parse(ChatCompletionRequest, body.chat(api.images))
        check_model(chat.model, await limits.get())
        with renamed(RENAMES):
            await api.options(chat)  # It refuses what a chat would refuse.
            return len(await api.encode_chat(chat))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> JSONResponse:
        values = await read_json(request, max_body_bytes=config.now.http.max_body_bytes)
        async with turn(turns):
            count = await until_disconnect(request.receive, counted(values))
        return JSONResponse({"input_tokens": count})
