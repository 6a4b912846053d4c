"""Observes HTTP calls: every request gets a record and an id, and every answer carries the id."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.serving.observe import CallObserver, CallRecord
from specray.serving.problems import problem_response
from specray.telemetry.conventions import Attributes, HttpCall, operation_attributes

REQUEST_ID_HEADER: Final = "X-Request-Id"
_RECORD: Final = "specray.record"
_PATHS: Final = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/responses"),
    *("/v1/messages/count_tokens", "/v1/messages"),
    *("/health", "/ready", "/version", "/metrics", "/debug/trace", "/ping", "/load"),
    *("/openapi.json", "/docs", "/tokenize", "/detokenize", "/tokenizer_info"),
)
_METHODS: Final = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"))
_TRACED: Final = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Operations that have spans, by their paths."""
_LEFT_BEFORE_ANSWER: Final = 499


class ObserveMiddleware:
    """The outermost middleware, so that refused calls are counted, too.

    Args:
        names_answers: False where a proxy in front puts the request id on every answer.
    """

    def __init__(self, app: ASGIApp, observer: CallObserver, *, names_answers: bool = True) -> None:
        self._app = app
        self._observer = observer
        self._names_answers = names_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._begin(scope)
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if self._names_answers:
                    headers[REQUEST_ID_HEADER] = record.client_request_id or record.request_id
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            record.failed(error)
            if status:
                raise
            await problem_response(error, scope, request_id=record.request_id)(scope, receive, observed)
        finally:
            self._observer.end(record, str(status or _LEFT_BEFORE_ANSWER))

    def _begin(self, scope: Scope) -> CallRecord:
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        known = next((name for name in _PATHS if path == name or path.startswith(f"{name}/")), "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        record = self._observer.begin(
            "http",
            f"{method} {known}",
            client_request_id=headers.get(REQUEST_ID_HEADER, ""),
            traceparent=headers.get("traceparent", ""),
            attributes=_attributes(scope, headers, known) if known in _TRACED else None,
        )
        record.operation = _TRACED.get(known, record.operation)
        scope[_RECORD] = record
        return record


def _attributes(scope: Scope, headers: Headers, known: str) -> Attributes:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    call = HttpCall(
        method=scope["method"],
        known_method=scope["method"] if scope["method"] in _METHODS else None,
        route=known if path == known else None,
        path=path,
        scheme=scope.get("scheme", "http"),
        host=headers.get("host", ""),
        user_agent=headers.get("user-agent", ""),
        version=scope.get("http_version", ""),
    )
    return {**call.attributes(), **operation_attributes(_TRACED[known])}


def record_of(request: Request) -> CallRecord:
    record: CallRecord = request.scope[_RECORD]
    return record
