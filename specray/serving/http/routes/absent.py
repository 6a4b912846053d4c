"""Endpoints of OpenAI's API and of other servers that this service does not offer: a reason, and no 404.

A 404 says that nothing is there: a proxy (LiteLLM) takes it for a dead deployment and refuses all calls for
seconds, and a client looks for its mistake in the address. A 5xx would be sent again by OpenAI's clients.
"""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from specray.serving.http.edge.observe import record_of
from specray.serving.problems import HttpError, problem_response

_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
_POOLING: Final = "the service generates text and computes no embeddings or scores"
_STATE: Final = "the service keeps nothing between calls"
_TEXT: Final = "the service reads and writes text only"

NOT_OFFERED: Final = (
    *((path, _POOLING) for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v2/rerank")),
    *((path, _POOLING) for path in ("/rerank", "/score", "/pooling", "/classify", "/v1/moderations")),
    *((path, _TEXT) for path in ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime", "/v1/edits")),
    *((path, _STATE) for path in ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/fine_tuning")),
    *((path, _STATE) for path in ("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/evals")),
    *((path, _STATE) for path in ("/v1/containers", "/v1/conversations", "/v1/responses/{response_id}")),
    ("/v1/chat/completions/{completion_id}", _STATE),
    ("/v1/messages/batches", _STATE),
    ("/v1/complete", "use /v1/messages"),
)
"""Paths, each with all below it, and why they are not offered."""


def add_absent_routes(app: FastAPI) -> None:
    for path, reason in NOT_OFFERED:
        _add(app, path, reason)


def _add(app: FastAPI, path: str, reason: str) -> None:
    async def refuse(request: Request) -> Response:
        problem = HttpError(400, f"{request.method} {path} is not offered here: {reason}", code="not_offered")
        record = record_of(request)
        record.failed(problem)
        response = problem_response(problem, request.scope, request_id=record.request_id)
        if request.method not in ("GET", "HEAD"):
            # The body, which may be a file, is not read.
            response.headers["Connection"] = "close"
        return response

    # Plain routes: for one of FastAPI's, which has nothing to read from these, signatures are looked into.
    app.add_route(path, refuse, methods=_METHODS)
    app.add_route(f"{path}/{{rest:path}}", refuse, methods=_METHODS)
