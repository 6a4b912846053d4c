"""Builds the HTTP ingress: an OpenAI-compatible FastAPI application in front of a RouterClient.

It has no state beyond the client and the tokenizer. Prompts and outputs are never logged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specray import __version__
from specray.config import Config
from specray.errors import EngineLostError, ModelNotFoundError, SpecrayError
from specray.interfaces import RouterClient
from specray.serving.admission.api_keys import Caller, Keyring
from specray.serving.admission.capacity import with_admission
from specray.serving.admission.middleware import AdmissionMiddleware
from specray.serving.generation import Delta, close
from specray.serving.http.body import read_json
from specray.serving.http.edge.paths import SlashMiddleware
from specray.serving.http.events import EventStreamResponse, until_disconnect
from specray.serving.http.key_check import KeyMiddleware, caller_of, check_observer
from specray.serving.http.observe import ObserveMiddleware, record_of
from specray.serving.http.openai_api import Call, OpenAiApi
from specray.serving.http.problems import HttpError, problem_body, problem_response
from specray.serving.http.timeout_header import with_timeout
from specray.serving.limits import ServiceLimits
from specray.serving.observe import CallObserver, CallRecord
from specray.serving.readiness import answer_within, check_ready
from specray.serving.validation import shown
from specray.telemetry.exposition import merged
from specray.tokenization import Tokenizer

CallParser = Callable[[object, Caller, CallRecord], Coroutine[Any, Any, Call]]
TextSource = Callable[[], Awaitable[str]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
METRICS_TIMEOUT_S = 10.0
_CLIENT_LEFT = 499
"""HTTP status of a request whose client is gone, as in nginx; nobody reads it."""


def build_http_app(
    *,
    client: RouterClient,
    tokenizer: Tokenizer,
    config: Config,
    keyring: Keyring | None = None,
    lifespan: Lifespan | None = None,
    observer: CallObserver | None = None,
    metrics_text: TextSource | None = None,
    names_answers: bool = True,
) -> FastAPI:
    """Builds the application.

    Args:
        client: the router.
        tokenizer: the target's tokenizer.
        keyring: API keys, shared with the gRPC endpoint, whose requests count too; default: one of its own.
        lifespan: runs around the application, for whatever else lives in its process.
        observer: records of calls, shared with the gRPC endpoint; default: one of its own, without traces.
        metrics_text: returns the text of /metrics; default: metrics of the router and of this application.
        names_answers: False where a proxy in front puts the request id on every answer.
    """
    app = FastAPI(
        title="specray", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    client = with_admission(client, config)
    limits = ServiceLimits(client, tokenizer, config)
    _add_problem_handlers(app)
    keyring = keyring or Keyring(config.auth)
    observer = observer or CallObserver(config.logging)
    _add_service_routes(app, client, is_terse=keyring.asks_for_key)
    _add_observer_routes(app, client, metrics_text or _own_metrics(client, observer))
    _add_model_routes(app, limits, config)
    _add_openai_routes(
        app, OpenAiApi(client=client, tokenizer=tokenizer, config=config, limits=limits), config
    )
    app.add_middleware(
        AdmissionMiddleware, max_calls=config.ingress.max_ongoing_requests, capacity=client.capacity
    )
    app.add_middleware(KeyMiddleware, keyring=keyring)
    app.add_middleware(ObserveMiddleware, observer=observer, names_answers=names_answers)
    app.add_middleware(SlashMiddleware)
    return app


def _own_metrics(client: RouterClient, observer: CallObserver) -> TextSource:
    async def text() -> str:
        return merged([await client.metrics_text(), observer.metrics.text()])

    return text


def _add_openai_routes(app: FastAPI, api: OpenAiApi, config: Config) -> None:
    async def run(request: Request, parse: CallParser) -> Response:
        values = await read_json(request, max_body_bytes=config.http.max_body_bytes)
        values = with_timeout(values, request.headers)
        call = await until_disconnect(request.receive, parse(values, caller_of(request), record_of(request)))
        if not call.is_stream:
            return JSONResponse(await until_disconnect(request.receive, api.answer(call)))
        deltas = api.deltas(call)
        first = await _first(request, deltas)
        return EventStreamResponse(api.events(call, first, deltas))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await run(request, api.completion_call)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await run(request, api.chat_call)


async def _first(request: Request, deltas: AsyncIterator[Delta]) -> Delta:
    async def first() -> Delta:
        return await anext(deltas)

    try:
        return await until_disconnect(request.receive, first())
    except BaseException:
        await close(deltas)
        raise


def _add_model_routes(app: FastAPI, limits: ServiceLimits, config: Config) -> None:
    async def model() -> dict[str, Any]:
        allowed = await limits.get()
        return {
            "id": config.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "specray",
            "max_model_len": allowed.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [await model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        if name != config.model_name:
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; allowed: {config.model_name!r}", field="model"
            )
        return JSONResponse(await model())


def _add_service_routes(app: FastAPI, client: RouterClient, *, is_terse: bool) -> None:
    """Adds the endpoints beside the API.

    ``is_terse``: a caller without a key learns that the service is not ready, but not why.
    """

    # Probes may use HEAD.
    @app.head("/health")
    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.head("/ready")
    @app.get("/ready")
    async def ready() -> JSONResponse:
        try:
            await check_ready(client)
        except EngineLostError:
            if is_terse:
                raise EngineLostError("not ready") from None
            raise
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


def _add_observer_routes(app: FastAPI, client: RouterClient, metrics_text: TextSource) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_observer(request)
        async with answer_within(METRICS_TIMEOUT_S, "metrics"):
            text = await metrics_text()
        return Response(text, headers={"Content-Type": PROMETHEUS_TEXT})

    @app.get("/debug/trace")
    async def trace(request: Request) -> Response:
        check_observer(request)
        async with answer_within(METRICS_TIMEOUT_S, "trace"):
            text = await client.trace_text()
        if text is None:
            raise HTTPException(404, "nothing is traced; set router.trace_events")
        return Response(text, media_type="application/jsonl")


def _add_problem_handlers(app: FastAPI) -> None:
    @app.exception_handler(SpecrayError)
    async def on_problem(request: Request, error: SpecrayError) -> Response:
        record = record_of(request)
        record.failed(error)
        return problem_response(error, request_id=record.request_id)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        problem = HttpError(error.status_code, message, code=code)
        record_of(request).failed(problem)
        return JSONResponse(problem_body(problem), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("", status_code=_CLIENT_LEFT)
