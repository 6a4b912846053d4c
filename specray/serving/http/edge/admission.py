"""The way of an HTTP call to the application: its place, its size, its body, its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.errors import OverloadedError, SpecrayError
from specray.serving.admission.capacity import RouterCapacity
from specray.serving.admission.places import Place, Places
from specray.serving.http.edge.body import (
    decode,
    discard,
    header_timeout_s,
    read_body,
    with_session,
    with_timeout,
)
from specray.serving.http.edge.connections import first_byte_at
from specray.serving.http.edge.gateway import with_gateway
from specray.serving.http.edge.keys import caller_of
from specray.serving.http.edge.observe import record_of
from specray.serving.problems import HttpError, problem_response

_CALL: Final = "specray.call"
_CHATS: Final = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_GENERATING: Final = ("/v1/completions", *_CHATS)
_MANAGING: Final = ("/load_lora_adapter", "/unload_lora_adapter")
_PATHS: Final = (*_GENERATING, *_MANAGING, "/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Paths whose calls have a body. What is sent to others is not read."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A call whose body is there."""

    place: Place
    body: bytes
    request: Request
    objectives: Mapping[str, int] | None = None
    """Priorities by the objectives of a trusted gateway; None: there is no such gateway."""

    def values(self) -> object:
        return decode(self.body)

    def timed_values(self) -> object:
        """Decodes the body, with what headers add to it. Raises HttpError, InvalidRequestError."""
        headers = self.request.headers
        values = with_session(with_timeout(self.values(), headers), headers)
        return values if self.objectives is None else with_gateway(values, headers, self.objectives)


class AdmissionMiddleware:
    """Gives calls their places, reads their bodies, and refuses what the routers are known to refuse.

    At ten times the capacity, running the application for every call would cost more than the answers. A body
    that is unclear is left to the application.

    Args:
        places: of this Ingress.
        capacity: free capacity of the routers, as far as it is known.
        max_bytes: returns the bytes of the longest body, and of the longest one of a chat.
        objectives: priorities by the objectives of a trusted gateway; None: there is no such gateway.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        places: Places,
        capacity: RouterCapacity,
        max_bytes: Callable[[], tuple[int, int]],
        objectives: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._places = places
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._objectives = objectives

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Health checks are answered by a full service, too.
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        with ExitStack() as stack:
            try:
                scope[_CALL] = await self._arrived(Request(scope), receive, stack)
            except ClientDisconnect:
                return
            except SpecrayError as error:
                stack.close()
                await self._refuse(error, scope, receive, send)
            else:
                await self._app(scope, receive, send)

    async def _arrived(self, request: Request, receive: Receive, stack: ExitStack) -> Arrived:
        path = request.scope["path"]
        place = stack.enter_context(
            self._places.arrive(caller_of(request), arrived_s=first_byte_at(request.scope))
        )
        timeout_s = header_timeout_s(request.headers)
        if timeout_s is not None:
            place.limit(timeout_s)
        longest, longest_chat = self._max_bytes()
        max_bytes = longest_chat if path.endswith(_CHATS) else longest
        body = await read_body(request, receive, place, max_bytes=max_bytes)
        place.begin()
        if path.endswith(_GENERATING):
            if self._capacity.may_refuse and (asks := _standing(body)) is not None:
                self._capacity.check(*caller_of(request).standing(*asks))
            slot = await self._capacity.limiter.enter()
            stack.callback(slot.leave)
        return Arrived(place, body, request, self._objectives)

    async def _refuse(self, error: SpecrayError, scope: Scope, receive: Receive, send: Send) -> None:
        # The status is counted; a log line for each refusal would be a flood of its own.
        if not isinstance(error, OverloadedError):
            record_of(Request(scope)).failed(error)
        if isinstance(error, HttpError) and error.status == 413:
            await discard(receive)
        await problem_response(error, scope)(scope, receive, send)


def arrived(request: Request) -> Arrived:
    call: Arrived = request.scope[_CALL]
    return call


def _standing(body: bytes) -> tuple[str, int] | None:
    """Reads the tenant and the priority that a body asks for; None: not clear."""
    try:
        values = from_json(body)
        priority = values.get("priority") or 0
        tenant = (values.get("speculation") or {}).get("tenant") or ""
    except (ValueError, AttributeError):
        return None
    return (tenant, priority) if isinstance(tenant, str) and type(priority) is int else None
