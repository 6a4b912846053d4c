"""Checks API keys over HTTP: only the open paths are reached without one."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.errors import NotAllowedError, UnauthenticatedError
from specray.serving.admission.api_keys import Caller, Keyring
from specray.serving.http.edge.observe import record_of
from specray.serving.problems import problem_response

LAB_PATH: Final = "/lab"
"""Path of the page on which people try prompts; those of its files are below it."""
_CALLER: Final = "specray.caller"
_FOR_OTHERS: Final = frozenset({"forwarded", "origin", "via", "x-forwarded-for", "x-real-ip"})
"""Headers by which proxies and browsers name those for whom they call."""


class Turns:
    """Lets one request through in each turn of the event loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Its request may have been cancelled.
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


class KeyMiddleware:
    """Finds the caller of every request, or answers 401 before anything else of the request is read.

    Of each key's requests, and of those without, one goes on in each turn of the event loop: so a turn stays
    short, however many connections have a request ready.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._turns: defaultdict[str | None, Turns] = defaultdict(Turns)
        """Turns by the name of the key; None: without a key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            caller = scope[_CALLER] = (
                None
                if self._keyring.is_open(LAB_PATH if path.startswith(f"{LAB_PATH}/") else path)
                else self._keyring.identify(_authorization(request.headers))
            )
            await self._turns[None if caller is None else caller.name].take()
        except UnauthenticatedError as error:
            await self._turns[None].take()
            record_of(request).failed(error)
            await problem_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> list[str]:
    """The values of ``Authorization``; without it, ``x-api-key``, by which Anthropic's clients send keys."""
    return headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]


def caller_of(request: Request) -> Caller:
    caller: Caller | None = request.scope[_CALLER]
    return caller or Caller()


def check_manager(request: Request) -> None:
    """Lets a call change what is served: by a key that may, or without keys from this machine itself.

    Raises:
        NotAllowedError: it may not.
    """
    caller = caller_of(request)
    if not caller.can_manage:
        raise NotAllowedError(f"this key may not call {request.url.path}; needed: can_manage")
    if caller.name is None and not _is_own_call(request):
        raise NotAllowedError(
            f"{request.url.path} is answered without a key on loopback only, without a proxy or a page of "
            "another origin; needed elsewhere: a key with can_manage"
        )


def _is_own_call(request: Request) -> bool:
    """Whether a program on this machine calls; proxies and browsers, which call for others, say so."""
    if _FOR_OTHERS.intersection(request.headers) or request.client is None:
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def check_observer(request: Request) -> None:
    if not caller_of(request).can_observe:
        raise NotAllowedError(f"this key may not read {request.url.path}; needed: can_observe")
