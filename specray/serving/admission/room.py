"""Refusals over HTTP that cost next to nothing: before the body is read, or before anybody looks into it."""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.errors import OverloadedError
from specray.serving.admission.refusals import KnownRoom
from specray.serving.http.body import BODY_TIMEOUT_S
from specray.serving.http.events import timely
from specray.serving.http.key_check import caller_of
from specray.serving.http.problems import problem_response

_ROOM_RETRY_S = 1.0
_SCREENED_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class RoomMiddleware:
    """Bounds the calls that one ingress has in hand, and refuses what its routers are known to refuse.

    At ten times the load the way through the application would cost more than the answers. Whatever is
    unclear about a body is left to the application. A call whose client does not read loses its place.

    Args:
        max_calls: in hand; those beyond are refused before their body is read.
        room: of the routers.
    """

    def __init__(self, app: ASGIApp, *, max_calls: int, room: KnownRoom) -> None:
        self._app = app
        self._max_calls = max_calls
        self._room = room
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whether the service lives can be asked of a full one too.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request, passage = Request(scope), None
        send = timely(send)
        self._num_calls += 1
        try:
            if self._num_calls > self._max_calls:
                reason = f"{self._max_calls} calls are in hand; allowed: {self._max_calls}"
                raise OverloadedError(reason, _ROOM_RETRY_S)
            if scope["path"].endswith(_SCREENED_PATHS):
                receive, is_whole = await self._screened(request, receive)
                # Whoever is slow to send must not hold up others.
                passage = await self._room.entrance.enter() if is_whole else None
        except OverloadedError as error:
            # Its status is counted; a line in the log for each would be a flood of its own.
            await problem_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        finally:
            self._num_calls -= 1
            if passage is not None:
                passage.leave()

    async def _screened(self, request: Request, receive: Receive) -> tuple[Receive, bool]:
        """What the application is to receive, and whether that is all. Raises OverloadedError."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                first = await receive()
        except TimeoutError:
            return receive, False
        is_whole = first["type"] == "http.request" and not first.get("more_body")
        if is_whole and self._room.is_tight:
            place = _place(first.get("body", b""))
            if place is not None:
                self._room.check(*caller_of(request).standing(*place))
        return _after(first, receive), is_whole


def _place(body: bytes) -> tuple[str, int] | None:
    """The tenant and the priority that a body asks for; None: not clear."""
    try:
        values = from_json(body)
        priority = values.get("priority") or 0
        tenant = (values.get("speculation") or {}).get("tenant") or ""
    except (ValueError, AttributeError):
        return None
    return (tenant, priority) if isinstance(tenant, str) and type(priority) is int else None


def _after(first: Message, receive: Receive) -> Receive:
    """Receives ``first`` once more, and then the rest."""
    is_open = True

    async def replayed() -> Message:
        nonlocal is_open
        if is_open:
            is_open = False
            return first
        return await receive()

    return replayed
