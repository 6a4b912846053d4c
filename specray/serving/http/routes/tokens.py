"""The endpoints of the tokenizer, with vLLM's bodies: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from specray.errors import InvalidRequestError
from specray.serving.admission.places import Place
from specray.serving.calls.limits import ServiceLimits
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.edge.admission import arrived
from specray.serving.http.events import until_disconnect
from specray.serving.http.extras import check_extras
from specray.serving.http.openai_api import OpenAiApi
from specray.serving.http.responses import GET
from specray.serving.http.schemas import Fields, parse_request
from specray.serving.validation import Limits, check_token_ids, out_of_range
from specray.tokenization import Tokenizer


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


def add_token_routes(app: FastAPI, api: OpenAiApi, tokenizer: Tokenizer, limits: ServiceLimits) -> None:
    """Adds the endpoints; ``api`` encodes conversations as it does for chats."""

    async def answered(
        request: Request, work: Callable[[dict[str, Any], Limits, Place], Awaitable[dict[str, Any]]]
    ) -> JSONResponse:
        call = arrived(request)

        async def answer() -> JSONResponse:
            values = await api.calls.read(call.values, call.place)
            if not isinstance(values, dict):
                raise InvalidRequestError("the body is no JSON object; allowed: a JSON object")
            async with call.place.in_time():
                if isinstance(model := values.get("model"), str):
                    await api.calls.adapter_of(model)
                result = await work(values, await limits.get(), call.place)
                return await api.calls.work(partial(JSONResponse, result), call.place)

        return await until_disconnect(request.receive, answer())

    async def tokenized(values: dict[str, Any], allowed: Limits, place: Place) -> dict[str, Any]:
        if "messages" in values:
            fields, token_ids = await _encoded_chat(values, api, allowed, place)
        else:
            fields = api.parse(TokenizeRequest, values)
            check_extras(fields.model_extra or {}, n=1)
            encode = partial(
                tokenizer.encode, fields.prompt, add_special_tokens=fields.add_special_tokens is not False
            )
            token_ids = await api.calls.work(encode, place)
        list_strings = partial(tokenizer.token_strings, token_ids)
        return {
            "count": len(token_ids),
            "max_model_len": allowed.max_model_len,
            "tokens": list(token_ids),
            "token_strs": await api.calls.work(list_strings, place) if fields.return_token_strs else None,
        }

    async def detokenized(values: dict[str, Any], allowed: Limits, place: Place) -> dict[str, Any]:
        def decoded() -> str:
            fields = api.parse(DetokenizeRequest, values)
            check_extras(fields.model_extra or {}, n=1)
            check_token_ids("tokens", fields.tokens, allowed)
            return tokenizer.decode(fields.tokens, skip_special_tokens=False)

        return {"prompt": await api.calls.work(decoded, place)}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        return await answered(request, tokenized)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        return await answered(request, detokenized)

    @app.api_route("/tokenizer_info", methods=GET)
    async def tokenizer_info() -> JSONResponse:
        allowed = await limits.get()
        return JSONResponse({**tokenizer.info(), "model_max_length": allowed.max_model_len})


async def _encoded_chat(
    values: Mapping[str, Any], api: OpenAiApi, allowed: Limits, place: Place
) -> tuple[TokenizeFields, tuple[int, ...]]:
    own = {name: values[name] for name in ("add_special_tokens", "return_token_strs") if name in values}
    fields = parse_request(TokenizeFields, own)
    if fields.add_special_tokens:
        raise out_of_range("add_special_tokens", True, "false with messages, whose template writes its own")
    chat = api.parse(
        ChatCompletionRequest, {name: value for name, value in values.items() if name not in own}
    )
    return fields, await api.encode_chat(chat, place)
