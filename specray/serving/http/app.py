"""Builds the HTTP ingress: an OpenAI-compatible FastAPI application in front of a RouterClient.

It has no state beyond the client and the tokenizer. Prompts and outputs are never logged.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specray.config import Config
from specray.config.live import LiveConfig
from specray.grammar import PreparedCompiler
from specray.interfaces import RouterClient
from specray.serving.admission.api_keys import Keyring
from specray.serving.admission.capacity import Admission, RouterCapacity, max_requests
from specray.serving.calls.limits import ServiceLimits
from specray.serving.calls.prepare import CallPreparer
from specray.serving.http.edge.admission import Arrived, arrived
from specray.serving.http.edge.observe import record_of
from specray.serving.http.events import EventStreamResponse, StartedStream, until_disconnect
from specray.serving.http.identity import identify
from specray.serving.http.messages_api.calls import add_count_route, messages_call
from specray.serving.http.openai_api import Call, OpenAiApi
from specray.serving.http.responses_api.calls import responses_call
from specray.serving.http.routes.adapters import add_adapter_routes
from specray.serving.http.routes.service import (
    TextSource,
    add_model_routes,
    add_observer_routes,
    add_service_routes,
)
from specray.serving.http.routes.tokens import add_token_routes
from specray.serving.http.shell import Lifespan, add_edge, new_app
from specray.serving.observe import CallObserver, CallRecord
from specray.telemetry.exposition import merged, with_vllm_names
from specray.tokenization import Tokenizer

CallParser = Callable[[Arrived, CallRecord], Coroutine[Any, Any, Call]]


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
    live = LiveConfig.of(config)
    config = live.now
    admission = Admission.of(client, config)
    keyring = keyring or Keyring(config.auth)
    observer = observer or CallObserver(config.logging)
    app = new_app(lifespan)
    add_service_routes(app, admission, is_terse=lambda: keyring.asks_for_key)
    metrics_text = metrics_text or _own_metrics(admission.routers, observer)
    if config.metrics.vllm_names:
        metrics_text = named_twice(metrics_text, config.model_name)
    add_observer_routes(app, admission.routers, metrics_text)
    limits = add_call_routes(app, admission, tokenizer, live, compiler)
    add_edge(
        app,
        live=live,
        admission=admission,
        keyring=keyring,
        observer=observer,
        names_answers=names_answers,
        max_chat_bytes=lambda: limits.max_chat_bytes,
    )
    return app


def add_call_routes(
    app: FastAPI,
    admission: Admission,
    tokenizer: Tokenizer,
    live: LiveConfig,
    compiler: PreparedCompiler | None = None,
) -> ServiceLimits:
    """Adds all that is asked of one model. Returns its limits."""
    config = live.now
    limits = ServiceLimits(admission.routers, tokenizer, live)
    identity = identify(config)
    calls = CallPreparer(
        admission=admission,
        tokenizer=tokenizer,
        config=live,
        limits=limits,
        compiler=compiler or PreparedCompiler.of(tokenizer),
    )
    api = OpenAiApi(admission=admission, tokenizer=tokenizer, config=live, calls=calls, identity=identity)
    add_model_routes(app, limits, identity, admission.adapters)
    add_adapter_routes(app, api, admission.adapters)
    add_token_routes(app, api, tokenizer, limits)
    add_count_route(app, api)
    _add_generating_routes(app, api, live)
    live.listen(_Follower(config, admission.capacity, api))
    return limits


class _Follower:
    def __init__(self, config: Config, capacity: RouterCapacity, api: OpenAiApi) -> None:
        self._speculation = config.speculation
        self._capacity = capacity
        self._api = api

    def __call__(self, config: Config) -> None:
        self._capacity.set_max_requests(max_requests(config))
        if config.speculation != self._speculation:
            self._speculation = config.speculation
            self._api.fingerprint = identify(config).system_fingerprint


def _own_metrics(client: RouterClient, observer: CallObserver) -> TextSource:
    async def text(scope: str) -> str:
        return merged([await client.metrics_text(), observer.metrics.text()])

    return text


def named_twice(source: TextSource, model_name: str) -> TextSource:
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
