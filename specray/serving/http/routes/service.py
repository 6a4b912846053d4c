"""Endpoints next to the API: the model, and those for probes, load balancers and observers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specray import __version__
from specray.errors import EngineLostError, InvalidRequestError, shown
from specray.interfaces import RouterClient
from specray.serving.adapters import AdapterCatalog
from specray.serving.admission.capacity import Admission
from specray.serving.calls.limits import ServiceLimits
from specray.serving.http.edge.keys import check_observer
from specray.serving.http.identity import Identity
from specray.serving.http.responses import GET
from specray.serving.readiness import Liveness, answer_within, check_ready

TextSource = Callable[[str], Awaitable[str]]
"""Text by its scope, of SCOPES."""
SCOPES: Final = ("service", "node")
"""Scopes of /metrics: all replicas, or those on the node of the one that answers."""

METRICS_TIMEOUT_S = 10.0


def add_service_routes(
    app: FastAPI,
    admission: Admission,
    *,
    is_terse: Callable[[], bool],
    checks_ready: Callable[[str | None], Awaitable[None]] | None = None,
) -> None:
    """Adds what probes and gateways ask for.

    Args:
        is_terse: True while a caller without a key learns that the service is not ready, but not why.
        checks_ready: raises EngineLostError unless the model that /ready names is ready, without a name the
            service; default: asks the Router.
    """

    liveness = Liveness(admission.routers)

    # The second is SageMaker's, and of what imitates it; some send POST.
    @app.api_route("/health", methods=GET)
    @app.api_route("/ping", methods=[*GET, "POST"])
    async def health() -> JSONResponse:
        await liveness.check()
        return JSONResponse({"status": "ok"})

    @app.api_route("/ready", methods=GET)
    async def ready(request: Request) -> JSONResponse:
        try:
            if checks_ready is None:
                await check_ready(admission.routers)
            else:
                await checks_ready(request.query_params.get("model"))
        except EngineLostError:
            if is_terse():
                raise EngineLostError("not ready") from None
            raise
        return JSONResponse({"status": "ready"})

    @app.api_route("/load", methods=GET)
    async def load() -> JSONResponse:
        return JSONResponse({"server_load": admission.num_requests})

    @app.api_route("/version", methods=GET)
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


def add_observer_routes(app: FastAPI, routers: RouterClient, metrics_text: TextSource) -> None:
    @app.api_route("/metrics", methods=GET)
    async def metrics(request: Request) -> Response:
        check_observer(request)
        scope = request.query_params.get("scope", SCOPES[0])
        if scope not in SCOPES:
            raise InvalidRequestError(
                f"scope is {shown(scope)}; allowed: {' or '.join(SCOPES)}", field="scope"
            )
        async with answer_within(METRICS_TIMEOUT_S, "metrics"):
            text = await metrics_text(scope)
        return Response(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @app.api_route("/debug/trace", methods=GET)
    async def trace(request: Request) -> Response:
        check_observer(request)
        async with answer_within(METRICS_TIMEOUT_S, "trace"):
            text = await routers.trace_text()
        if text is None:
            raise HTTPException(404, "nothing is traced; set router.trace_events")
        return Response(text, media_type="application/jsonl")


def add_model_routes(
    app: FastAPI, limits: ServiceLimits, identity: Identity, adapters: AdapterCatalog
) -> None:
    @app.api_route("/v1/models", methods=GET)
    async def models() -> JSONResponse:
        info = await limits.known_info()
        refs = [None, *await adapters.refs()]
        return JSONResponse({"object": "list", "data": [identity.model(info, ref) for ref in refs]})

    @app.api_route("/v1/models/{name:path}", methods=GET)
    async def one_model(name: str) -> JSONResponse:
        return JSONResponse(identity.model(await limits.known_info(), await adapters.find(name)))
