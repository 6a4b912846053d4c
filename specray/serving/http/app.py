"""Builds the HTTP ingress: an OpenAI-compatible FastAPI application in front of a RouterClient.

It has no state beyond the client and the tokenizer. Prompts and outputs are never logged.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specray import __version__
from specray.config import Config, HttpConfig
from specray.config.live import LiveConfig
from specray.errors import SpecrayError
from specray.grammar import PreparedCompiler
from specray.interfaces import RouterClient
from specray.serving.admission.api_keys import Keyring
from specray.serving.admission.capacity import Admission, RouterCapacity, max_requests
from specray.serving.calls.limits import ServiceLimits
from specray.serving.calls.prepare import CallPreparer
from specray.serving.http.edge.admission import AdmissionMiddleware, Arrived, arrived
from specray.serving.http.edge.hosts import HostMiddleware, PathMiddleware, host_test
from specray.serving.http.edge.keys import KeyMiddleware
from specray.serving.http.edge.observe import REQUEST_ID_HEADER, ObserveMiddleware, record_of
from specray.serving.http.events import EventStreamResponse, StartedStream, until_disconnect
from specray.serving.http.identity import identify
from specray.serving.http.messages_api.calls import add_count_route, messages_call
from specray.serving.http.openai_api import LEFT_OUT_HEADER, Call, OpenAiApi
from specray.serving.http.responses_api.calls import responses_call
from specray.serving.http.routes.absent import add_absent_routes
from specray.serving.http.routes.adapters import add_adapter_routes
from specray.serving.http.routes.lab_page import add_lab_routes, has_lab
from specray.serving.http.routes.openapi import add_openapi_routes
from specray.serving.http.routes.service import (
    TextSource,
    add_model_routes,
    add_observer_routes,
    add_service_routes,
)
from specray.serving.http.routes.tokens import add_token_routes
from specray.serving.observe import CallObserver, CallRecord
from specray.serving.problems import HttpError, problem_response
from specray.telemetry.exposition import merged, with_vllm_names
from specray.tokenization import Tokenizer

CallParser = Callable[[Arrived, CallRecord], Coroutine[Any, Any, Call]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_READABLE: Final = (REQUEST_ID_HEADER, LEFT_OUT_HEADER, "Retry-After", "Retry-After-Ms")
"""Headers of answers that a page of another origin may read besides the common ones."""


def build_http_app(
    *,
    client: RouterClient | Admission,
    tokenizer: Tokenizer,
    config: Config | LiveConfig,
    keyring: Keyring | None = None,
    lifespan: Lifespan | None = None,
    observer: CallObserver | None = None,
    metrics_text: TextSource | None = None,
    names_answers: bool = True,
    compiler: PreparedCompiler | None = None,
) -> FastAPI:
    """Builds the application.

    Args:
        client: of the routers, or the admission to them that the gRPC endpoint shares.
        tokenizer: the target's tokenizer.
        config: the configuration; the holder of one that changes while serving.
        keyring: API keys, shared with the gRPC endpoint, whose requests count too; default: one of its own.
        lifespan: runs around the application, for whatever else lives in its process.
        observer: records of calls, shared with the gRPC endpoint; default: one of its own, without traces.
        metrics_text: returns the text of /metrics; default: metrics of the router and of this application.
        names_answers: False where a proxy is in front, which puts the request id on every answer.
        compiler: of grammars, shared with the gRPC endpoint; default: one of its own, made at first need.
    """
    app = FastAPI(
        title="specray", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    live = LiveConfig.of(config)
    config = live.now
    admission = Admission.of(client, config)
    routers = admission.routers
    limits = ServiceLimits(routers, tokenizer, live)
    _add_problem_handlers(app)
    keyring = keyring or Keyring(config.auth)
    observer = observer or CallObserver(config.logging)
    identity = identify(config)
    calls = CallPreparer(
        admission=admission,
        tokenizer=tokenizer,
        config=live,
        limits=limits,
        compiler=compiler or PreparedCompiler.of(tokenizer),
    )
    api = OpenAiApi(admission=admission, tokenizer=tokenizer, config=live, calls=calls, identity=identity)
    add_service_routes(app, admission, is_terse=lambda: keyring.asks_for_key)
    metrics_text = metrics_text or _own_metrics(routers, observer)
    if config.metrics.vllm_names:
        metrics_text = _named_twice(metrics_text, config.model_name)
    add_observer_routes(app, routers, metrics_text)
    add_model_routes(app, limits, identity, admission.adapters)
    add_adapter_routes(app, api, admission.adapters)
    add_token_routes(app, api, tokenizer, limits)
    add_count_route(app, api)
    _add_generating_routes(app, api, live)
    if config.http.openapi:
        add_openapi_routes(app, asks_for_key=lambda: keyring.asks_for_key)
    if has_lab(config.http):
        add_lab_routes(app)
    add_absent_routes(app)
    app.add_middleware(
        AdmissionMiddleware,
        places=admission.places,
        capacity=admission.capacity,
        max_bytes=lambda: (live.now.http.max_body_bytes, limits.max_chat_bytes),
        objectives=config.http.gateway_objectives if config.http.trust_gateway else None,
    )
    # With ``serve deploy`` Serve's own configuration says where its proxy listens.
    is_elsewhere = config.http.server == "auto" and not names_answers
    is_ours = host_test(config.http, asks_for_key=lambda: keyring.asks_for_key, is_elsewhere=is_elsewhere)
    app.add_middleware(HostMiddleware, is_ours=is_ours)
    app.add_middleware(KeyMiddleware, keyring=keyring)
    app.add_middleware(ObserveMiddleware, observer=observer, names_answers=names_answers)
    _add_cors(app, config.http)
    live.listen(_Follower(config, admission.capacity, keyring, observer, api))
    app.add_middleware(PathMiddleware)
    return app


class _Follower:
    def __init__(
        self,
        config: Config,
        capacity: RouterCapacity,
        keyring: Keyring,
        observer: CallObserver,
        api: OpenAiApi,
    ) -> None:
        self._speculation = config.speculation
        self._capacity = capacity
        self._keyring = keyring
        self._observer = observer
        self._api = api

    def __call__(self, config: Config) -> None:
        self._capacity.set_max_requests(max_requests(config))
        self._keyring.configure(config.auth)
        self._observer.configure(config.logging)
        if config.speculation != self._speculation:
            self._speculation = config.speculation
            self._api.fingerprint = identify(config).system_fingerprint


def _own_metrics(client: RouterClient, observer: CallObserver) -> TextSource:
    async def text(scope: str) -> str:
        return merged([await client.metrics_text(), observer.metrics.text()])

    return text


def _named_twice(source: TextSource, model_name: str) -> TextSource:
    async def text(scope: str) -> str:
        return with_vllm_names(await source(scope), model_name)

    return text


def _add_generating_routes(app: FastAPI, api: OpenAiApi, config: LiveConfig) -> None:
    async def run(request: Request, parse: CallParser) -> Response:
        call = await until_disconnect(request.receive, parse(arrived(request), record_of(request)))
        if not call.is_stream:
            answer = await until_disconnect(request.receive, api.answer(call))
            return JSONResponse(answer, headers=call.headers)
        started = await _begun(request, api.started(call), grace_s=config.now.http.first_token_grace_s)
        response = EventStreamResponse(api.events(call, started), started, comment=call.format.waiting)
        response.headers.update(call.headers)
        return response

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await run(request, api.completion_call)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await run(request, api.chat_call)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await run(request, partial(responses_call, api))

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await run(request, partial(messages_call, api))


async def _begun(request: Request, started: StartedStream, *, grace_s: float) -> StartedStream:
    """Raises what fails within the grace, which so has a status of its own."""
    try:
        await until_disconnect(request.receive, started.wait(grace_s))
    except BaseException:
        await started.aclose()
        raise
    return started


def _add_cors(app: FastAPI, config: HttpConfig) -> None:
    """Adds the middleware, around all that may answer with an error; nothing without origins.

    Keys travel in ``Authorization``, which a page sets itself: no cookies are used, so none are allowed.
    """
    if not config.cors_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=_READABLE,
        # Seconds for which a browser may keep the answer to a preflight.
        max_age=600,
    )


def _add_problem_handlers(app: FastAPI) -> None:
    @app.exception_handler(SpecrayError)
    async def on_problem(request: Request, error: SpecrayError) -> Response:
        record = record_of(request)
        record.failed(error)
        return problem_response(error, request.scope, request_id=record.request_id)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        problem = HttpError(error.status_code, message, code=code)
        record_of(request).failed(problem)
        response = problem_response(problem, request.scope, request_id=record_of(request).request_id)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        # HTTP status of a request whose client is gone, as in nginx; nobody reads it.
        return PlainTextResponse("", status_code=499)
