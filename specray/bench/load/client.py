"""A small OpenAI client that records when everything arrived. Every wait has a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from specray.errors import EngineLostError, InvalidRequestError, OverloadedError, SpecrayError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamEvent:
    arrived_s: float
    """Arrival in seconds, on the monotonic clock."""
    body: Mapping[str, Any]

    @property
    def text(self) -> str:
        return "".join(_added_text(choice) for choice in self.body.get("choices") or ())


def _added_text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")


def _path(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def key_header(key: str | None) -> dict[str, str]:
    """Returns the header with the API key; empty without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class ServerClient:
    """Calls one server; an async context manager.

    Args:
        url: URL of the server without ``/v1``.
        timeout_s: seconds allowed for one call, from its start to its last byte.
        max_connections: connections at a time; 0: one for each call.
        keep_alive: reuses connections. Not for a server that closes them without notice: a call on such a
            connection fails.
        key: API key, for a server that asks for one.
        model: model or adapter of bodies that name none; empty: the server's own.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        max_connections: int = 0,
        keep_alive: bool = True,
        key: str | None = None,
        model: str = "",
    ) -> None:
        self._named = {"model": model} if model else {}
        self._headers = key_header(key)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        self._max_connections = max_connections
        self._keep_alive = keep_alive
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=self._max_connections, force_close=not self._keep_alive),
            read_bufsize=4 * 1024 * 1024,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def stream_completion(self, body: Mapping[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """POSTs a completion, or a chat where there are messages, with ``stream`` and yields the events.

        Raises:
            InvalidRequestError, OverloadedError: as the server says.
            EngineLostError: the server is away, too slow, or lost its target.
            SpecrayError: it failed.
        """
        url = f"{self._url}{_path(body)}"
        try:
            async with self._opened.post(url, json={**self._named, **body, "stream": True}) as response:
                await _raise_for_status(response)
                async for line in response.content:
                    event = parse_event(line)
                    if event is not None:
                        yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self._url, error) from None

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POSTs the same and returns the whole response. Raises like ``stream_completion``."""
        return await self.post(_path(body), {**self._named, **body})

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POSTs a body of JSON and returns the answer's. Raises like ``stream_completion``."""
        try:
            async with self._opened.post(f"{self._url}{path}", json=body) as response:
                await _raise_for_status(response)
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self._url, error) from None

    async def metrics_text(self) -> str:
        """GETs /metrics. Raises like ``stream_completion``."""
        return await self._get("/metrics")

    async def listed(self) -> list[dict[str, Any]]:
        """Returns the entries of /v1/models. Raises like ``stream_completion``."""
        text = await self._get("/v1/models")
        try:
            return [dict(model) for model in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            raise SpecrayError(f"server {self._url}: /v1/models is no list of models") from None

    async def models(self) -> list[str]:
        """Returns the served models' names. Raises like ``stream_completion``."""
        return [str(model.get("id")) for model in await self.listed()]

    async def is_deterministic(self) -> bool:
        """Whether the service says so of its first model. Raises like ``stream_completion``."""
        listed = await self.listed()
        return bool(listed) and listed[0].get("is_deterministic") is True

    async def max_model_len(self) -> int | None:
        """Returns tokens of prompt and output together, at most, of the first served model.

        None: the server does not tell. Raises like ``stream_completion``.
        """
        listed = await self.listed()
        try:
            length = listed[0].get("max_model_len")
            return None if length is None else int(length)
        except (ValueError, LookupError, TypeError):
            raise SpecrayError(f"server {self._url}: /v1/models is no list of models") from None

    async def model(self) -> str:
        """Returns the first served model's name. Raises like ``stream_completion``."""
        names = await self.models()
        if not names:
            raise SpecrayError(f"server {self._url}: /v1/models lists no model")
        return names[0]

    async def _get(self, path: str) -> str:
        try:
            async with self._opened.get(f"{self._url}{path}") as response:
                await _raise_for_status(response)
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self._url, error) from None

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use it as a context manager"
        return self._session


def parse_event(line: bytes) -> StreamEvent | None:
    """Decodes one line of the stream; None if it is no event. Raises SpecrayError for an error."""
    field, _, data = line.strip().partition(b":")
    data = data.strip()
    # Comments keep a quiet connection open; llama.cpp reports errors in a field of their own.
    if field not in (b"data", b"error") or not data or data == b"[DONE]":
        return None
    try:
        body = json.loads(data)
    except ValueError:
        raise SpecrayError(f"an event of the stream is not JSON: {data[:80]!r}") from None
    if field == b"error":
        raise SpecrayError(str(body.get("message", "the stream failed")))
    if "error" in body:
        message = str(body["error"].get("message", "the stream failed"))
        is_retriable = body["error"].get("code") == "service_unavailable"
        raise EngineLostError(message) if is_retriable else SpecrayError(message)
    return StreamEvent(time.monotonic(), body)


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.text()
    try:
        error = json.loads(text)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = text[:200], None
    if response.status == 429:
        raise OverloadedError(message, float(response.headers.get("Retry-After", "1")))
    if response.status == 503:
        raise EngineLostError(message)
    if response.status < 500:
        raise InvalidRequestError(f"the server answers {response.status}: {message}", field=field)
    raise SpecrayError(f"the server answers {response.status}: {message}")


def _unreachable(url: str, error: Exception) -> EngineLostError:
    return EngineLostError(f"server {url}: {str(error) or type(error).__name__}")
