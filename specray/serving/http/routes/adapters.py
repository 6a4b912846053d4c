"""Loading and unloading adapters while serving, with vLLM's paths and fields."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse

from specray.requests import AdapterRef
from specray.serving.adapters import AdapterCatalog
from specray.serving.http.edge.admission import arrived
from specray.serving.http.edge.keys import check_manager
from specray.serving.http.openai_api import OpenAiApi


class LoadAdapterRequest(BaseModel):
    """Body of a load."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None
    """Which of several models it changes."""


class UnloadAdapterRequest(BaseModel):
    """Body of an unload."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    lora_name: str
    model: str | None = None


def add_adapter_routes(app: FastAPI, api: OpenAiApi, catalog: AdapterCatalog) -> None:
    # The second path of each is SGLang's.
    @app.post("/v1/load_lora_adapter")
    @app.post("/load_lora_adapter")
    async def load(request: Request) -> JSONResponse:
        check_manager(request)
        body = api.parse(LoadAdapterRequest, arrived(request).values())
        catalog.check_base(body.model)
        ref = await catalog.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return JSONResponse(_shown(ref))

    @app.post("/v1/unload_lora_adapter")
    @app.post("/unload_lora_adapter")
    async def unload(request: Request) -> JSONResponse:
        check_manager(request)
        body = api.parse(UnloadAdapterRequest, arrived(request).values())
        catalog.check_base(body.model)
        return JSONResponse(_shown(await catalog.unload(body.lora_name)))


def _shown(ref: AdapterRef) -> dict[str, object]:
    return {"lora_name": ref.name, "lora_path": ref.folder, "digest": ref.digest.hex()}
