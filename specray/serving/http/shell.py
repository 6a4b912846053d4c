"""The HTTP application without its calls: answers to errors, and what every request passes first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from specray import __version__
from specray.config import Config, HttpConfig
from specray.config.live import LiveConfig
from specray.errors import SpecrayError
from specray.serving.admission.api_keys import Keyring
from specray.serving.admission.capacity import Admission
from specray.serving.http.edge.admission import AdmissionMiddleware
from specray.serving.http.edge.hosts import HostMiddleware, PathMiddleware, host_test
from specray.serving.http.edge.keys import KeyMiddleware
from specray.serving.http.edge.observe import REQUEST_ID_HEADER, ObserveMiddleware, record_of
from specray.serving.http.openai_api import LEFT_OUT_HEADER
from specray.serving.http.routes.absent import add_absent_routes
from specray.serving.http.routes.lab_page import add_lab_routes, has_lab
from specray.serving.http.routes.openapi import add_openapi_routes
from specray.serving.observe import CallObserver
from specray.serving.problems import HttpError, problem_response

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_READABLE: Final = (REQUEST_ID_HEADER, LEFT_OUT_HEADER, "Retry-After", "Retry-After-Ms")
"""Headers of answers that a page of another origin may read besides the common ones."""


def new_app(lifespan: Lifespan | None = None) -> FastAPI:
    """An application without routes, which answers errors in the form of the API that was asked."""
    app = FastAPI(
        title="specray", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    _add_problem_handlers(app)
    return app


def add_edge(
    app: FastAPI,
    *,
    live: LiveConfig,
    admission: Admission,
    keyring: Keyring,
    observer: CallObserver,
    names_answers: bool,
    max_chat_bytes: Callable[[], int],
) -> None:
    """Adds pages, and all that is between the server and the application's calls; after the last call.

    Args:
        max_chat_bytes: returns the bytes of the longest body of a chat.
    """
    config = live.now
    if config.http.openapi:
        add_openapi_routes(app, asks_for_key=lambda: keyring.asks_for_key)
    if has_lab(config.http):
        add_lab_routes(app)
    add_absent_routes(app)
    app.add_middleware(
        AdmissionMiddleware,
        places=admission.places,
        capacity=admission.capacity,
        max_bytes=lambda: (live.now.http.max_body_bytes, max_chat_bytes()),
        objectives=config.http.gateway_objectives if config.http.trust_gateway else None,
    )
    # With ``serve deploy`` Serve's own configuration says where its proxy listens.
    is_elsewhere = config.http.server == "auto" and not names_answers
    is_ours = host_test(config.http, asks_for_key=lambda: keyring.asks_for_key, is_elsewhere=is_elsewhere)
    app.add_middleware(HostMiddleware, is_ours=is_ours)
    app.add_middleware(KeyMiddleware, keyring=keyring)
    app.add_middleware(ObserveMiddleware, observer=observer, names_answers=names_answers)
    _add_cors(app, config.http)

    def follow(now: Config) -> None:
        keyring.configure(now.auth)
        observer.configure(now.logging)

    live.listen(follow)
    app.add_middleware(PathMiddleware)


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
