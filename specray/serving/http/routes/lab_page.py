"""The page /lab, on which people see what speculation does with a prompt: files of the package, as they are.

The page itself holds nothing of the service; what it asks of the API needs a key, where keys are set.
It loads nothing from elsewhere, and what is not one of its files does not run in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from specray.config import HttpConfig
from specray.serving.http.edge.hosts import is_loopback
from specray.serving.http.edge.keys import LAB_PATH
from specray.serving.http.responses import GET

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def has_lab(config: HttpConfig) -> bool:
    """Whether the page is served: by default where only this machine reaches it."""
    return config.lab == "on" or (config.lab == "auto" and is_loopback(config.host))


def add_lab_routes(app: FastAPI) -> None:
    @app.api_route(LAB_PATH, methods=GET)
    async def page() -> Response:
        return _answer("index.html")

    for name in sorted(_contents()):
        # A browser that asked for the page with a slash at its end looks for them one folder deeper.
        for folder in (LAB_PATH, f"{LAB_PATH}/lab"):
            app.add_route(f"{folder}/{name}", _file(name), methods=GET)


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return _answer(name)

    return answer


def _answer(name: str) -> Response:
    return Response(_contents()[name], headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])


@cache
def _contents() -> dict[str, bytes]:
    folder = files("specray.serving.http") / "lab"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}
