"""Makes a path with a slash at its end the path without."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class SlashMiddleware:
    """Removes slashes at the end of a path; the outermost middleware, so that all see the same path.

    A redirect would be wrong: behind a proxy that ends TLS it names an http address, and a client that
    follows it sends prompt and key in the clear.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)
