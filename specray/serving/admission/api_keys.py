"""API keys: who calls, what the caller may do, and how many requests the caller may have at a time.

A key is 256 random bits, so one SHA-256 of it is enough at rest: salt and slow hashes protect passwords,
which can be guessed. Keys are compared in constant time, and every configured one is compared.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from specray.config import AuthConfig, KeyConfig
from specray.config.access import ServiceLevelConfig
from specray.errors import InvalidRequestError, NotAllowedError, OverloadedError, UnauthenticatedError
from specray.requests import GenerateRequest, Quota, ServiceLevel, SpeculationParams

KEY_PREFIX: Final = "sk-specray-"
_KEY_BYTES: Final = 32
_RETRY_AFTER_S: Final = 1.0


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """Returns the SHA-256 of a key in hexadecimal, which is all that the configuration holds of it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Caller:
    """The owner of one key, over HTTP and gRPC together, and the requests that it has under way here.

    Without a key (the service asks for none) everything is allowed and nothing is changed.
    """

    def __init__(
        self, key: KeyConfig | None = None, *, model: str = "", of_all: Caller | None = None
    ) -> None:
        self._num_requests = 0
        self._num_queued_tokens = 0
        self._model = model
        self._of_all = of_all
        """The same caller with the requests to all models; None: this is it."""
        self._of_models: dict[str, Caller] = {}
        self.set_key(key)

    def set_key(self, key: KeyConfig | None) -> None:
        """Serves the next calls under another key, or other rules of the same one."""
        self._key = key
        self._quota = None if key is None else _quota(key)
        for model, caller in self._of_models.items():
            caller.set_key(key and _for_model(key, model))

    def at_model(self, name: str) -> Caller:
        """The caller with its requests to one model, where the key has limits for it; else itself."""
        key = self._key
        if key is None or name not in key.model_quotas:
            return self
        return self._of_models.setdefault(
            name, Caller(_for_model(key, name), model=f" of model {name!r}", of_all=self)
        )

    @property
    def name(self) -> str | None:
        return None if self._key is None else self._key.name

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @property
    def num_queued_tokens(self) -> int:
        return self._num_queued_tokens

    @property
    def can_observe(self) -> bool:
        return self._key is None or self._key.can_observe

    @property
    def can_manage(self) -> bool:
        """Without a key: whoever calls from this machine, which the endpoint checks."""
        return self._key is None or self._key.can_manage

    def check_model(self, name: str) -> None:
        """Raises NotAllowedError unless the key may ask for the model of this name, which is no alias."""
        key = self._key
        if key is not None and key.models is not None and name not in key.models:
            raise NotAllowedError(
                f"key {key.name!r} may not ask for model {name!r}; allowed: {', '.join(key.models)}"
            )

    def standing(self, tenant: str, priority: int) -> tuple[str, int]:
        """Returns the tenant and the priority under which a request that claims these is served."""
        key = self._key
        return (tenant, priority) if key is None else (key.tenant_name, max(priority, key.min_priority))

    def apply_policy(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Returns the requests under the key's policy: tenant, priority, level, speculation."""
        key = self._key
        if key is None:
            return list(requests)
        return [
            replace(
                request,
                speculation=_under_policy(key, request.speculation),
                priority=max(request.priority, key.min_priority),
                quota=self._quota,
                level=level_of(key.slo) or request.level,
            )
            for request in requests
        ]

    def enter(self) -> Holding:
        """Reserves one request of the caller's quota for a call of which no more is known yet.

        Raises:
            OverloadedError: the key has too many requests in hand.
        """
        holding = Holding(self)
        holding.claim([0])
        return holding

    def _check(self, num_requests: int, num_tokens: int, *, held: Holding) -> None:
        key = self._key
        if key is None:
            return
        most, num_others = key.max_requests, self._num_requests - held.num_requests
        if most is not None and num_requests > most:
            raise InvalidRequestError(
                f"number of prompts times n is {num_requests}; allowed for this key: 1..{most}", field="n"
            )
        if most is not None and num_others + num_requests > most:
            raise OverloadedError(
                f"key {key.name!r} has {num_others} requests{self._model} in hand; allowed: {most}",
                _RETRY_AFTER_S,
            )
        most, num_waiting = key.max_queued_tokens, self._num_queued_tokens - held.num_tokens
        # One call alone is always let in, as in the router's queue.
        if most is not None and num_waiting and num_waiting + num_tokens > most:
            raise OverloadedError(
                f"key {key.name!r} has {num_waiting} prompt tokens{self._model} waiting; allowed: {most}",
                _RETRY_AFTER_S,
            )
        if self._of_all is not None:
            self._of_all._check(num_requests, num_tokens, held=held)

    def _take(self, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self._num_queued_tokens += num_tokens
        assert self._num_requests >= 0 and self._num_queued_tokens >= 0
        if self._of_all is not None:
            self._of_all._take(num_requests, num_tokens)


class Holding:
    """The part of its caller's quota that one call holds, until it is closed."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.num_requests = 0
        self._waiting: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self._waiting.values())

    def to_model(self, name: str) -> Caller:
        """Holds the same of the caller's quota for one model, and returns the caller as it asks for that.

        Raises:
            OverloadedError: the key would have too much of this model in hand; the call holds nothing.
        """
        num_tokens = list(self._waiting.values())
        self.close()
        self._caller = self._caller.at_model(name)
        self.claim(num_tokens)
        return self._caller

    def claim(self, num_tokens: Sequence[int]) -> None:
        """Holds these requests in place of what it holds: first by an estimate, then exactly.

        Args:
            num_tokens: prompt tokens of each request.

        Raises:
            OverloadedError: the key would have too much in hand; nothing was changed.
            InvalidRequestError: the call alone is more than the key allows at a time.
        """
        self._caller._check(len(num_tokens), sum(num_tokens), held=self)
        self.close()
        self.num_requests, self._waiting = len(num_tokens), dict(enumerate(num_tokens))
        self._caller._take(self.num_requests, sum(num_tokens))

    def answered(self, index: int, *, is_last: bool = False) -> None:
        """Notes that a request has tokens, so that its prompt no longer waits; once: that it has ended."""
        self._caller._take(-is_last, -self._waiting.pop(index, 0))
        self.num_requests -= is_last

    def close(self) -> None:
        """Holds nothing. Idempotent."""
        self._caller._take(-self.num_requests, -self.num_tokens)
        self.num_requests = 0
        self._waiting.clear()


class Keyring:
    """The configured keys. If there are none, everybody is let in."""

    def __init__(self, auth: AuthConfig) -> None:
        self._anyone = Caller()
        self._callers: list[tuple[bytes, Caller]] = []
        self.configure(auth)

    def configure(self, auth: AuthConfig) -> None:
        """Knows these keys from now on. Calls under way go on as they were let in.

        A key that keeps its name keeps what it has in hand, also when it is another key: it is rotated.
        """
        known = {caller.name: caller for _, caller in self._callers}
        callers = []
        for key in auth.keys:
            caller = known.get(key.name) or Caller()
            caller.set_key(key)
            callers.append((key.sha256.encode(), caller))
        self._callers = callers
        self._open_paths = frozenset(("/health", "/ready", *auth.open_paths))

    @property
    def asks_for_key(self) -> bool:
        return bool(self._callers)

    def is_open(self, path: str) -> bool:
        return not self.asks_for_key or path in self._open_paths

    def identify(self, authorization: Sequence[str]) -> Caller:
        """Finds the caller by the values of the ``Authorization`` header or metadata.

        Raises:
            UnauthenticatedError: there is none, more than one, or it holds no key of this service.
        """
        if not self.asks_for_key:
            return self._anyone
        key = _bearer(authorization)
        digest = key_hash(key).encode()
        found: Caller | None = None
        for expected, caller in self._callers:
            # All keys are compared: the time must not tell which one came close.
            if hmac.compare_digest(digest, expected):
                found = caller
        if found is None:
            raise UnauthenticatedError("the API key is not known here")
        return found


def _quota(key: KeyConfig) -> Quota | None:
    if key.max_requests is None and key.max_queued_tokens is None:
        return None
    return Quota(key.name, key.max_requests, key.max_queued_tokens)


def _for_model(key: KeyConfig, name: str) -> KeyConfig:
    """The key as a Router of one model sees it, which has requests to no other."""
    limits = key.model_quotas.get(name)
    own = {} if limits is None else limits.model_dump(exclude_none=True)
    return key.model_copy(update=own)


def level_of(slo: ServiceLevelConfig) -> ServiceLevel | None:
    """The level that configured times mean; None: there are none."""
    if slo.ttft_ms is None and slo.itl_ms is None:
        return None
    return ServiceLevel(slo.ttft_ms, slo.itl_ms)


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
    """Returns the key in ``Bearer KEY``. Raises UnauthenticatedError; its text repeats no input."""
    if not authorization:
        raise UnauthenticatedError("an API key is missing; send it as Authorization: Bearer KEY")
    with suppress(ValueError):
        (value,) = authorization
        scheme, key = value.split()
        if scheme.lower() == "bearer" and len(key) <= 512:
            return key
    raise UnauthenticatedError("Authorization is not understood; allowed: one Bearer KEY")
