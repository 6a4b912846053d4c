"""API keys: who calls, what the caller may do, and how much of it at a time.

A key is 256 random bits, so one SHA-256 of it is enough at rest: salt and slow hashes protect passwords,
which can be guessed. Keys are compared in constant time, and every configured one is compared.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from specray.config import AuthConfig, KeyConfig
from specray.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from specray.interfaces import RouterClient
from specray.requests import GenerateRequest, Quota, SpeculationParams
from specray.serving.generation import Delta, close, complete, stream
from specray.tokenization import Tokenizer

KEY_PREFIX: Final = "sk-specray-"
_KEY_BYTES: Final = 32
_MAX_KEY_CHARS: Final = 512
_RETRY_AFTER_S: Final = 1.0


def new_key() -> str:
    """A key that nobody can guess: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """What the configuration holds of a key: SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Caller:
    """Whoever sends requests with one key, over HTTP and gRPC together, and what they have in hand here.

    Without a key (the service asks for none) everything is allowed and nothing is changed.
    """

    def __init__(self, key: KeyConfig | None = None) -> None:
        self._key = key
        self._quota = None if key is None else _quota(key)
        self._num_requests = 0
        self._num_queued_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests in hand: each prompt and choice of a call is one."""
        return self._num_requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests in hand that have not been answered yet."""
        return self._num_queued_tokens

    @property
    def can_observe(self) -> bool:
        """May read /metrics and /debug/trace."""
        return self._key is None or self._key.can_observe

    def tenant_of(self, request: GenerateRequest) -> str:
        """Whose the request is, whatever it claims; empty: nobody's."""
        return request.tenant if self._key is None else self._key.tenant_name

    def standing(self, tenant: str, priority: int) -> tuple[str, int]:
        """The tenant and the priority under which a request that claims these is served."""
        key = self._key
        return (tenant, priority) if key is None else (key.tenant_name, max(priority, key.min_priority))

    def own(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The requests under the key's tenant, urgency and speculation policy, whatever they claim."""
        key = self._key
        if key is None:
            return list(requests)
        return [
            replace(
                request,
                speculation=_under_policy(key, request.speculation),
                priority=max(request.priority, key.min_priority),
                quota=self._quota,
            )
            for request in requests
        ]

    def admit(self, requests: Sequence[GenerateRequest]) -> Admission:
        """A place for the requests of one call, held while its ``with`` block lasts.

        Raises:
            OverloadedError: the key has too much in hand; nothing was changed.
            InvalidRequestError: the call alone is more than the key allows at a time.
        """
        key = self._key
        if key is not None:
            self._check_requests(key, len(requests))
            self._check_tokens(key, sum(len(request.prompt_token_ids) for request in requests))
        return Admission(self, [len(request.prompt_token_ids) for request in requests])

    def _check_requests(self, key: KeyConfig, num_new: int) -> None:
        most = key.max_requests
        if most is None:
            return
        if num_new > most:
            raise InvalidRequestError(
                f"number of prompts times n is {num_new}; allowed for this key: 1..{most}", field="n"
            )
        if self._num_requests + num_new > most:
            raise OverloadedError(
                f"key {key.name!r} has {self._num_requests} requests in hand; allowed: {most}", _RETRY_AFTER_S
            )

    def _check_tokens(self, key: KeyConfig, num_new: int) -> None:
        most = key.max_queued_tokens
        # As in the router's queue, one call alone is always let in.
        if most is not None and self._num_queued_tokens and self._num_queued_tokens + num_new > most:
            raise OverloadedError(
                f"key {key.name!r} has {self._num_queued_tokens} prompt tokens waiting; allowed: {most}",
                _RETRY_AFTER_S,
            )

    def _take(self, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self._num_queued_tokens += num_tokens
        assert self._num_requests >= 0 and self._num_queued_tokens >= 0


class Admission:
    """What one call holds of its caller's limits, from its making to the end of its ``with`` block."""

    def __init__(self, caller: Caller, num_tokens: Sequence[int]) -> None:
        self._caller = caller
        self._num_requests = len(num_tokens)
        self._waiting = dict(enumerate(num_tokens))
        caller._take(self._num_requests, sum(num_tokens))

    def answered(self, index: int) -> None:
        """The request has its first tokens: its prompt waits no longer; idempotent."""
        self._caller._take(0, -self._waiting.pop(index, 0))

    def finished(self, index: int) -> None:
        """The request has ended; called once for each at most."""
        self.answered(index)
        self._num_requests -= 1
        self._caller._take(-1, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        num_requests, self._num_requests = self._num_requests, 0
        num_tokens = sum(self._waiting.values())
        self._waiting.clear()
        self._caller._take(-num_requests, -num_tokens)


class Keyring:
    """The configured keys. Without any, everybody is let in."""

    def __init__(self, auth: AuthConfig) -> None:
        self._callers = [(key.sha256.encode(), Caller(key)) for key in auth.keys]
        self._anyone = Caller()
        self._open_paths = frozenset(("/health", "/ready", *auth.open_paths))

    @property
    def asks_for_key(self) -> bool:
        return bool(self._callers)

    def is_open(self, path: str) -> bool:
        """The HTTP path is answered without a key."""
        return not self.asks_for_key or path in self._open_paths

    def identify(self, authorization: Sequence[str]) -> Caller:
        """The caller by the values of the ``Authorization`` header or metadata.

        Raises:
            UnauthenticatedError: there is none, more than one, or it holds no key of this service.
        """
        if not self.asks_for_key:
            return self._anyone
        key = _bearer(authorization)
        digest = key_hash(key).encode()
        found: Caller | None = None
        for expected, caller in self._callers:
            # No way out before the last one: the time must not tell which key came close.
            if hmac.compare_digest(digest, expected):
                found = caller
        if found is None:
            raise UnauthenticatedError("the API key is not known here")
        return found


async def complete_for(
    caller: Caller,
    client: RouterClient,
    requests: Sequence[GenerateRequest],
    tokenizer: Tokenizer,
    *,
    timeout_s: float,
) -> list[Delta]:
    """``generation.complete`` under the caller's name and limits. Raises what both raise."""
    with caller.admit(requests):
        return await complete(client, caller.own(requests), tokenizer, timeout_s=timeout_s)


async def stream_for(
    caller: Caller,
    client: RouterClient,
    requests: Sequence[GenerateRequest],
    tokenizer: Tokenizer,
    *,
    timeout_s: float,
) -> AsyncGenerator[Delta, None]:
    """``generation.stream`` under the caller's name and limits. Raises what both raise, at the first step."""
    with caller.admit(requests) as admission:
        deltas = stream(client, caller.own(requests), tokenizer, timeout_s=timeout_s)
        try:
            async for delta in deltas:
                admission.answered(delta.index)
                if delta.finish_reason is not None:
                    admission.finished(delta.index)
                yield delta
        finally:
            await close(deltas)


def _quota(key: KeyConfig) -> Quota | None:
    if key.max_requests is None and key.max_queued_tokens is None:
        return None
    return Quota(key.name, key.max_requests, key.max_queued_tokens)


def _under_policy(key: KeyConfig, wanted: SpeculationParams) -> SpeculationParams:
    most, asked = key.speculation.num_speculative_tokens, wanted.num_speculative_tokens
    if most is not None:
        asked = most if asked is None else min(asked, most)
    return replace(
        wanted,
        enabled=wanted.enabled and key.speculation.enabled,
        num_speculative_tokens=asked,
        tenant=key.tenant_name,
    )


def _bearer(authorization: Sequence[str]) -> str:
    """The key in ``Bearer KEY``. Raises UnauthenticatedError; the text repeats nothing of what came."""
    if not authorization:
        raise UnauthenticatedError("an API key is missing; send it as Authorization: Bearer KEY")
    with suppress(ValueError):
        (value,) = authorization
        scheme, key = value.split()
        if scheme.lower() == "bearer" and len(key) <= _MAX_KEY_CHARS:
            return key
    raise UnauthenticatedError("Authorization is not understood; allowed: one Bearer KEY")
