"""Makes one path of its spellings: with a slash at its end, and as a whole URL, which a proxy may send."""

from __future__ import annotations

import re
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE: Final = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class PathMiddleware:
    """The outermost middleware, so that all see the same path.

    A redirect would be wrong: behind a proxy that ends TLS it names an http address, and a client that
    follows it sends prompt and key in the clear.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and (url := _ABSOLUTE.fullmatch(path)):
            path = url[2] or "/"
            scope = {**scope, "path": path, "headers": _for_host(scope["headers"], url[1])}
        if scope["type"] == "http" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _for_host(headers: list[Any], host: str) -> list[Any]:
    # The host in the URL counts, whatever the header says (RFC 9112, 3.2.2).
    return [(b"host", host.encode()), *((name, value) for name, value in headers if name != b"host")]
