"""The endpoints of the tokenizer, with vLLM's bodies: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from specray.config.live import LiveConfig
from specray.errors import InvalidRequestError, OverloadedError
from specray.serving.http.body import read_json
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.events import until_disconnect
from specray.serving.http.extras import check_extras
from specray.serving.http.openai_api import OpenAiApi
from specray.serving.http.routes.methods import GET
from specray.serving.http.schemas import Fields, parse_request
from specray.serving.limits import ServiceLimits
from specray.serving.validation import Limits, check_model, check_token_ids, out_of_range
from specray.tokenization import Tokenizer

MAX_TOKENIZING_CALLS: Final = 2
"""Calls that tokenize at a time: long texts must not take the threads of calls that generate."""
_WAIT_S: Final = 10.0
"""Seconds that a call may wait for its turn."""
_OWN_FIELDS: Final = ("add_special_tokens", "return_token_strs")


class TokenizeFields(Fields):
    """What both forms of a /tokenize body have."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeRequest(TokenizeFields):
    """The body of /tokenize for text."""

    prompt: str


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


def add_token_routes(
    app: FastAPI, api: OpenAiApi, tokenizer: Tokenizer, limits: ServiceLimits, *, config: LiveConfig
) -> None:
    """Adds the endpoints; ``api`` encodes conversations as it does for chats."""
    turns = asyncio.Semaphore(MAX_TOKENIZING_CALLS)

    async def body_of(request: Request) -> dict[str, Any]:
        values = await read_json(request, max_body_bytes=config.now.http.max_body_bytes)
        if not isinstance(values, dict):
            raise InvalidRequestError("the body is no JSON object; allowed: a JSON object")
        return values

    async def in_turn(request: Request, work: Callable[[dict[str, Any], Limits], Any]) -> JSONResponse:
        values = await body_of(request)
        allowed = await limits.get()
        async with turn(turns):
            answer = await until_disconnect(request.receive, work(values, allowed))
        return JSONResponse(answer)

    async def tokenized(values: dict[str, Any], allowed: Limits) -> dict[str, Any]:
        if "messages" in values:
            fields, token_ids = await _encoded_chat(values, api, allowed)
        else:
            fields = api.parse(TokenizeRequest, values)
            _check(fields, allowed)
            adds = fields.add_special_tokens is not False
            token_ids = await asyncio.to_thread(tokenizer.encode, fields.prompt, add_special_tokens=adds)
        return {
            "count": len(token_ids),
            "max_model_len": allowed.max_model_len,
            "tokens": list(token_ids),
            "token_strs": tokenizer.token_strings(token_ids) if fields.return_token_strs else None,
        }

    async def detokenized(values: dict[str, Any], allowed: Limits) -> dict[str, Any]:
        fields = api.parse(DetokenizeRequest, values)
        _check(fields, allowed)
        check_token_ids("tokens", fields.tokens, allowed)
        text = await asyncio.to_thread(tokenizer.decode, fields.tokens, skip_special_tokens=False)
        return {"prompt": text}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        return await in_turn(request, tokenized)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        return await in_turn(request, detokenized)

    @app.api_route("/tokenizer_info", methods=GET)
    async def tokenizer_info() -> JSONResponse:
        allowed = await limits.get()
        return JSONResponse({**tokenizer.info(), "model_max_length": allowed.max_model_len})


async def _encoded_chat(
    values: Mapping[str, Any], api: OpenAiApi, allowed: Limits
) -> tuple[TokenizeFields, tuple[int, ...]]:
    own = {name: values[name] for name in _OWN_FIELDS if name in values}
    fields = parse_request(TokenizeFields, own)
    if fields.add_special_tokens:
        raise out_of_range("add_special_tokens", True, "false with messages, whose template writes its own")
    chat = api.parse(
        ChatCompletionRequest, {name: value for name, value in values.items() if name not in own}
    )
    check_model(chat.model, allowed)
    await api.options(chat)  # It refuses what a chat would refuse.
    return fields, await api.encode_chat(chat)


def _check(fields: TokenizeRequest | DetokenizeRequest, allowed: Limits) -> None:
    check_model(fields.model, allowed)
    check_extras(fields.model_extra or {}, n=1)


@asynccontextmanager
async def turn(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    """Waits for a turn. Raises OverloadedError if none comes."""
    try:
        async with asyncio.timeout(_WAIT_S):
            await turns.acquire()
    except TimeoutError:
        raise OverloadedError(
            f"{MAX_TOKENIZING_CALLS} calls are being tokenized; allowed: {MAX_TOKENIZING_CALLS}"
        ) from None
    try:
        yield
    finally:
        turns.release()
