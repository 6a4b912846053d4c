"""Admission control over HTTP: refuses calls before their body is read, or right after."""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.errors import OverloadedError
from specray.serving.admission.capacity import RouterCapacity
from specray.serving.http.body import BODY_TIMEOUT_S
from specray.serving.http.events import timely
from specray.serving.http.key_check import caller_of
from specray.serving.http.problems import problem_response

_RETRY_AFTER_S = 1.0
_SCREENED_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class AdmissionMiddleware:
    """Limits the calls that one ingress has under way, and refuses what its routers are known to refuse.

    At ten times the capacity, running the application for every call would cost more than the answers. A body
    that is unclear is left to the application. A call whose client does not read loses its place.

    Args:
        max_calls: calls under way; further ones are refused before their body is read.
        capacity: free capacity of the routers, as far as it is known.
    """

    def __init__(self, app: ASGIApp, *, max_calls: int, capacity: RouterCapacity) -> None:
        self._app = app
        self._max_calls = max_calls
        self._capacity = capacity
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Health checks are answered by a full service, too.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request, slot = Request(scope), None
        send = timely(send)
        self._num_calls += 1
        try:
            if self._num_calls > self._max_calls:
                reason = f"{self._max_calls} calls are in hand; allowed: {self._max_calls}"
                raise OverloadedError(reason, _RETRY_AFTER_S)
            if scope["path"].endswith(_SCREENED_PATHS):
                receive, is_whole = await self._screened(request, receive)
                # A client that sends slowly must not hold up others.
                slot = await self._capacity.limiter.enter() if is_whole else None
        except OverloadedError as error:
            # The status is counted; a log line for each refusal would be a flood of its own.
            await problem_response(error, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        finally:
            self._num_calls -= 1
            if slot is not None:
                slot.leave()

    async def _screened(self, request: Request, receive: Receive) -> tuple[Receive, bool]:
        """Checks the body as far as it has come. Raises OverloadedError.

        Returns:
            What the application is to receive, and whether the body is complete.
        """
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                first = await receive()
        except TimeoutError:
            return receive, False
        is_whole = first["type"] == "http.request" and not first.get("more_body")
        if is_whole and self._capacity.may_refuse:
            place = _place(first.get("body", b""))
            if place is not None:
                self._capacity.check(*caller_of(request).standing(*place))
        return _after(first, receive), is_whole


def _place(body: bytes) -> tuple[str, int] | None:
    """Reads the tenant and the priority that a body asks for; None: not clear."""
    try:
        values = from_json(body)
        priority = values.get("priority") or 0
        tenant = (values.get("speculation") or {}).get("tenant") or ""
    except (ValueError, AttributeError):
        return None
    return (tenant, priority) if isinstance(tenant, str) and type(priority) is int else None


def _after(first: Message, receive: Receive) -> Receive:
    """Returns a channel that delivers ``first`` again, and then the rest."""
    is_open = True

    async def replayed() -> Message:
        nonlocal is_open
        if is_open:
            is_open = False
            return first
        return await receive()

    return replayed
