"""The host and the path of a request: hosts of others are refused, and a path has one spelling.

A page whose name an attacker's DNS points at this machine (DNS rebinding) is of the same origin as what
answers there, and may read all of it; so the service answers to its own names alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.config import HttpConfig
from specray.serving.http.edge.observe import record_of
from specray.serving.problems import HttpError, problem_response

_HOST: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[A-Za-z0-9:.%]+\])(?::(?P<port>[0-9]{0,5}))?")
_URL: Final = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_SHOWN_CHARS: Final = 100

NameTest = Callable[[str], bool]
"""Whether a name, in lower case and without port, is one of this service."""


class HostMiddleware:
    """Answers 400 for a Host header that is none, and 421 for one of another service."""

    def __init__(self, app: ASGIApp, is_ours: NameTest) -> None:
        self._app = app
        self._is_ours = is_ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        record_of(Request(scope)).failed(problem)
        await problem_response(problem, scope)(scope, receive, send)

    def _problem(self, headers: Headers) -> HttpError | None:
        values = headers.getlist("host")
        if not values:
            return None  # HTTP/1.0, which no browser speaks; HTTP/1.1 does not get here without.
        match = _HOST.fullmatch(values[0])
        if len(values) > 1 or match is None or not _is_host(match["name"], match["port"]):
            return HttpError(
                400,
                f"Host is {', '.join(values)[:_SHOWN_CHARS]!r}; allowed: one name, with or without a port",
                code="invalid_host",
            )
        if self._is_ours(match["name"].lower().removesuffix(".")):
            return None
        return HttpError(
            421,
            f"Host is {values[0][:_SHOWN_CHARS]!r}, which is no name of this service; http.allowed_hosts "
            "lists them",
            code="misdirected_request",
        )


def host_test(
    config: HttpConfig, *, asks_for_key: Callable[[], bool], is_elsewhere: bool = False
) -> NameTest:
    """Returns the test that ``http.allowed_hosts`` describes.

    Args:
        config: the configuration.
        asks_for_key: whether the service asks for a key now.
        is_elsewhere: whether ``http.host`` does not say where HTTP listens.
    """
    names = config.allowed_hosts
    if names is None:
        if is_elsewhere or not is_loopback(config.host):
            return lambda name: True
        # No public DNS answers for a name without a dot, so none of those is an attacker's.
        return lambda name: is_loopback(name) or asks_for_key() or not any(c in name for c in ".[")
    if "*" in names:
        return lambda name: True
    allowed = {name.lower().removesuffix(".") for name in names}
    return lambda name: name in allowed or is_loopback(name)


def _is_host(name: str, port: str | None) -> bool:
    try:
        return int(port or 0) <= 65535 and (name[0] != "[" or bool(IPv6Address(name[1:-1])))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address with or without brackets, is this machine alone."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


class PathMiddleware:
    """The outermost middleware: drops a slash at a path's end, and takes whole URLs, which a proxy may send.

    A redirect would be wrong: behind a proxy that ends TLS it names an http address, and a client that
    follows it sends prompt and key in the clear.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and (url := _URL.fullmatch(path)):
            path = url[2] or "/"
            scope = {**scope, "path": path, "headers": _for_host(scope["headers"], url[1])}
        if scope["type"] == "http" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _for_host(headers: list[Any], host: str) -> list[Any]:
    # The host in the URL counts, whatever the header says (RFC 9112, 3.2.2).
    return [(b"host", host.encode()), *((name, value) for name, value in headers if name != b"host")]
