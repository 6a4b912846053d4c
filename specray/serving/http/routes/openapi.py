"""The OpenAPI document of the HTTP API, made from the schemas that check request bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse

from specray import __version__
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.messages_api.schema import CountTokensRequest, MessagesRequest
from specray.serving.http.responses import GET
from specray.serving.http.responses_api.schema import ResponsesRequest
from specray.serving.http.routes.docs_page import add_docs_route
from specray.serving.http.routes.tokens import DetokenizeRequest, TokenizeRequest
from specray.serving.http.schemas import GRAMMAR_FIELDS, CompletionRequest, SamplingFields
from specray.serving.problems import is_anthropic_path
from specray.serving.validation import RANGES

Json = dict[str, Any]

_BODIES: Final[Mapping[str, tuple[type[BaseModel], str]]] = {
    "/v1/completions": (CompletionRequest, "Continues one or many prompts."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answers a conversation."),
    "/v1/responses": (ResponsesRequest, "Answers a conversation, as OpenAI's Responses API does."),
    "/v1/messages": (MessagesRequest, "Answers a conversation, as Anthropic's Messages API does."),
    "/v1/messages/count_tokens": (CountTokensRequest, "Tokens of a conversation in Anthropic's form."),
    "/tokenize": (TokenizeRequest, "Tokens of a prompt; with messages in its place, of a conversation."),
    "/detokenize": (DetokenizeRequest, "Text of tokens."),
}
_READ: Final[Mapping[str, str]] = {
    "/v1/models": "The served model.",
    "/health": "Whether a Router answers.",
    "/ping": "The same.",
    "/ready": "Whether the target computes.",
    "/load": "Requests in hand.",
    "/version": "The version.",
    "/tokenizer_info": "Special tokens and chat template.",
    "/metrics": "Prometheus text.",
}
_TEXTS: Final = ("/metrics",)
_CHAT: Final = [{"role": "user", "content": "What is a B-tree?"}]
_EXAMPLES: Final[Mapping[str, Json]] = {
    "/v1/completions": {"prompt": "def mean(values):\n", "max_tokens": 32},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 32},
    "/v1/responses": {"input": "What is a B-tree?", "max_output_tokens": 32},
    "/v1/messages": {"messages": _CHAT, "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": _CHAT},
    "/tokenize": {"prompt": "What is a B-tree?"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
"""Bodies that any model answers, by path."""
_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final[Json] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


def add_openapi_routes(app: FastAPI, *, asks_for_key: Callable[[], bool]) -> None:
    """Adds /openapi.json, and /docs for people.

    Args:
        asks_for_key: says, at each call, whether the service asks for keys now.
    """
    documents = {is_asked: openapi_document(asks_for_key=is_asked) for is_asked in (False, True)}

    @app.api_route("/openapi.json", methods=GET)
    async def openapi() -> JSONResponse:
        return JSONResponse(documents[asks_for_key()])

    add_docs_route(app, lambda: documents[asks_for_key()])


def openapi_document(*, asks_for_key: bool) -> Json:
    models = [(schema, "validation") for schema, _ in _BODIES.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas: Json = definitions["$defs"]
    for schema, _ in _BODIES.values():
        _describe(schemas[schema.__name__], has_sampling=issubclass(schema, SamplingFields))
    schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components: Json = {"schemas": schemas}
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "specray", "version": __version__},
        "paths": {
            **{path: {"post": _writing(path, *entry)} for path, entry in _BODIES.items()},
            **{path: {"get": _reading(path, text)} for path, text in _READ.items()},
        },
        "components": components,
    }
    if asks_for_key:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"header": []}]
    return document


def _describe(schema: Json, *, has_sampling: bool) -> None:
    """Adds the ranges of numbers, and the fields that are read apart from the schema."""
    properties: Json = schema["properties"]
    for name, allowed in RANGES.items():
        for entry in properties.get(name, {}).get("anyOf", ()):
            if entry.get("type") in ("integer", "number"):
                entry["exclusiveMinimum" if allowed.is_low_open else "minimum"] = allowed.low
                entry["maximum"] = allowed.high
    if has_sampling:
        properties.update({name: {} for name in sorted(GRAMMAR_FIELDS)})


def _writing(path: str, schema: type[BaseModel], text: str) -> Json:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    answers: Json = {"application/json": {"schema": {"type": "object"}}}
    if path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"schema": reference, "example": _EXAMPLES[path]}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": _responses(answers, "AnthropicError" if is_anthropic_path(path) else "Error"),
    }


def _reading(path: str, text: str) -> Json:
    kind, schema = ("text/plain", "string") if path in _TEXTS else ("application/json", "object")
    return {"summary": text, "responses": _responses({kind: {"schema": {"type": schema}}})}


def _responses(answers: Json, error_name: str = "Error") -> Json:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_name}"}}}
    return {
        "200": {"description": "The answer.", "content": answers},
        "4XX": {"description": "The caller's mistake, or too many calls.", "content": error},
        "5XX": {"description": "The service cannot answer now.", "content": error},
    }
