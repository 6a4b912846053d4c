"""The HTTP application in front of several models: each call goes to the application of the model it names.

Paths that are about one model are that model's own application's, as if it served alone. The others, and all
that a call passes before, are of this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.config import ModelConfig
from specray.config.live import LiveConfig
from specray.errors import ModelNotFoundError, shown
from specray.loading.owner import ModelStatus
from specray.loading.table import ModelState
from specray.requests import AdapterRef
from specray.serving.admission.api_keys import Keyring
from specray.serving.admission.capacity import Admission
from specray.serving.calls.prepare import read_in_turn
from specray.serving.http.edge.admission import Arrived, arrived
from specray.serving.http.edge.body import decode
from specray.serving.http.edge.keys import check_manager
from specray.serving.http.events import until_disconnect
from specray.serving.http.identity import Identity, identify
from specray.serving.http.responses import GET
from specray.serving.http.routes.service import (
    TextSource,
    add_observer_routes,
    add_service_routes,
)
from specray.serving.http.schemas import Fields, parse_request
from specray.serving.http.shell import Lifespan, add_edge, new_app
from specray.serving.models.catalog import ModelCatalog
from specray.serving.models.routers import SeveralRouters
from specray.serving.observe import CallObserver

CALL_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"),
)
"""Paths whose bodies name a model."""
TIMEOUT_S = 600.0
"""Seconds for a load or an unload that is asked for by itself, where nothing is said."""


class ChangeRequest(Fields):
    """The body of /v1/models/load and /v1/models/unload."""

    model: str
    timeout_s: float | None = Field(None, gt=0, le=86_400)


def build_several_app(
    *,
    catalog: ModelCatalog,
    routers: SeveralRouters,
    config: LiveConfig,
    admission: Admission,
    keyring: Keyring,
    observer: CallObserver,
    metrics_text: TextSource,
    lifespan: Lifespan | None = None,
    names_answers: bool = True,
) -> FastAPI:
    """Builds the application; see ``build_http_app`` for the arguments."""
    app = new_app(lifespan)

    def is_terse() -> bool:
        return keyring.asks_for_key

    add_service_routes(app, admission, is_terse=is_terse, checks_ready=routers.check)
    add_observer_routes(app, routers, metrics_text)
    endpoint = _ToModel(catalog, admission)
    app.router.routes.extend(Route(path, endpoint, methods=["POST"]) for path in CALL_PATHS)
    app.router.routes.append(Route("/tokenizer_info", endpoint, methods=[*GET]))
    _add_change_routes(app, catalog)
    _add_list_routes(app, catalog, config)
    add_edge(
        app,
        live=config,
        admission=admission,
        keyring=keyring,
        observer=observer,
        names_answers=names_answers,
        max_chat_bytes=lambda: _max_chat_bytes(catalog, config.now.http.max_body_bytes),
    )
    return app


class _ToModel:
    """An endpoint that is the application of the model that a call names."""

    def __init__(self, catalog: ModelCatalog, admission: Admission) -> None:
        self._catalog = catalog
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.url.path.endswith("lora_adapter"):
            # Who may not change it loads no model for it either.
            check_manager(request)
        if request.method == "POST":
            call = arrived(request)
            entering = self._entered(call)
        else:
            entering = self._loaded(request.query_params.get("model"))
        app = await until_disconnect(receive, entering)
        await app(scope, receive, send)

    async def _entered(self, call: Arrived) -> ASGIApp:
        asked = await read_in_turn(lambda: _model_in(call.body), call.place, self._admission)
        return (await self._catalog.enter(asked, call.place)).app

    async def _loaded(self, asked: str | None) -> ASGIApp:
        return (await self._catalog.answers(self._catalog.find(asked).name)).app


def _model_in(body: bytes) -> str | None:
    values = decode(body)
    asked = values.get("model") if isinstance(values, dict) else None
    return asked if isinstance(asked, str) else None


def _max_chat_bytes(catalog: ModelCatalog, most: int) -> int:
    """The bytes of the longest body that any model could read; of one that is not known yet, all."""
    known = [each.limits.max_chat_bytes for each in catalog.made.values()]
    return max(known) if len(known) == len(catalog.models) else most


def _add_change_routes(app: FastAPI, catalog: ModelCatalog) -> None:
    async def changed(request: Request, change: Callable[[str, float], Any]) -> JSONResponse:
        check_manager(request)
        asked = parse_request(ChangeRequest, decode(await request.body()))
        model = catalog.find(asked.model)
        status = await change(model.name, asked.timeout_s or TIMEOUT_S)
        return JSONResponse({"model": model.name, **_status(status)})

    @app.post("/v1/models/load")
    async def load(request: Request) -> JSONResponse:
        return await changed(request, catalog.owner.load)

    @app.post("/v1/models/unload")
    async def unload(request: Request) -> JSONResponse:
        return await changed(request, catalog.owner.unload)


def _add_list_routes(app: FastAPI, catalog: ModelCatalog, config: LiveConfig) -> None:
    identities: dict[str, Identity] = {}

    async def entries(models: list[ModelConfig]) -> list[dict[str, Any]]:
        statuses = await catalog.owner.statuses()
        return [entry for each in models for entry in await described(each, statuses)]

    async def described(model: ModelConfig, statuses: Mapping[str, ModelStatus]) -> list[dict[str, Any]]:
        identity = identities.get(model.name)
        if identity is None:
            alone = config.now.of_model(model.name)
            identity = identities[model.name] = await asyncio.to_thread(identify, alone)
        status = statuses[model.name]
        info, refs = None, list[AdapterRef]()
        if status.state is ModelState.LOADED and (made := catalog.made.get(model.name)) is not None:
            info, refs = await made.limits.known_info(), await made.admission.adapters.refs()
        entry = {**identity.model(info), "status": _status(status)}
        aliases = [{**entry, "id": alias, "parent": model.name} for alias in model.aliases]
        adapters = [{**identity.model(info, ref), "id": f"{model.name}:{ref.name}"} for ref in refs]
        return [entry, *aliases, *adapters]

    @app.api_route("/v1/models", methods=GET)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": await entries(list(catalog.models.values()))})

    @app.api_route("/v1/models/{name:path}", methods=GET)
    async def one_model(name: str) -> JSONResponse:
        model = catalog.find(name)
        _, colon, adapter = name.partition(":")
        wanted = f"{model.name}:{adapter}" if colon else name
        if colon and (await catalog.owner.statuses())[model.name].state is ModelState.LOADED:
            await catalog.answers(model.name)
        for entry in await entries([model]):
            if entry["id"] == wanted:
                return JSONResponse({**entry, "id": name})
        raise ModelNotFoundError(f"model {shown(name)} is not served here", field="model")


def _status(status: ModelStatus) -> dict[str, Any]:
    return {
        "value": status.state.value,
        "reason": status.reason or None,
        "memory_gib": round(status.memory_gib, 3),
        "load_s": None if status.load_s is None else round(status.load_s, 3),
    }
