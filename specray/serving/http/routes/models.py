"""The endpoints that describe the served model."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse

from specray.errors import ModelNotFoundError, shown
from specray.serving.calls.limits import ServiceLimits
from specray.serving.http.identity import Identity
from specray.serving.http.routes.methods import GET


def add_model_routes(app: FastAPI, limits: ServiceLimits, identity: Identity) -> None:
    """Adds /v1/models."""

    @app.api_route("/v1/models", methods=GET)
    async def models() -> JSONResponse:
        allowed = await limits.get()
        return JSONResponse({"object": "list", "data": [identity.model(allowed.max_model_len)]})

    @app.api_route("/v1/models/{name:path}", methods=GET)
    async def one_model(name: str) -> JSONResponse:
        if name != identity.name:
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; allowed: {identity.name!r}", field="model"
            )
        allowed = await limits.get()
        return JSONResponse(identity.model(allowed.max_model_len))
