"""Limits of what the requests of one API key may hold of a router at a time, through any ingress."""

from __future__ import annotations

from dataclasses import dataclass

from specray.errors import OverloadedError
from specray.requests import GenerateRequest

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _KeyUsage:
    num_requests: int = 0
    num_queued_tokens: int = 0


class Quotas:
    """Counts requests from arrival to end, and their prompt tokens until they are let in, by key."""

    def __init__(self) -> None:
        self._held: dict[str, _KeyUsage] = {}
        """Held requests and tokens of the keys that have a quota and hold something."""

    def __len__(self) -> int:
        return len(self._held)

    def check(self, request: GenerateRequest) -> None:
        """Raises OverloadedError when the request would be more than its key may have in hand."""
        quota = request.quota
        if quota is None:
            return
        held = self._held.get(quota.name, _KeyUsage())
        if quota.max_requests is not None and held.num_requests >= quota.max_requests:
            reason = f"{held.num_requests} requests in hand; allowed: {quota.max_requests}"
            raise OverloadedError(f"key {quota.name!r} has {reason}", _RETRY_AFTER_S)
        num_tokens = held.num_queued_tokens
        # As in the queue, one request alone is always let in.
        num_wanted = num_tokens + len(request.prompt_token_ids)
        if quota.max_queued_tokens is not None and num_tokens and num_wanted > quota.max_queued_tokens:
            reason = f"{num_tokens} prompt tokens waiting; allowed: {quota.max_queued_tokens}"
            raise OverloadedError(f"key {quota.name!r} has {reason}", _RETRY_AFTER_S)

    def take(self, request: GenerateRequest) -> None:
        """The request waits; it has been checked."""
        if request.quota is not None:
            held = self._held.setdefault(request.quota.name, _KeyUsage())
            held.num_requests += 1
            held.num_queued_tokens += len(request.prompt_token_ids)

    def let_in(self, request: GenerateRequest) -> None:
        """The request waits no longer; called once for each at most."""
        if request.quota is not None:
            self._held[request.quota.name].num_queued_tokens -= len(request.prompt_token_ids)

    def release(self, request: GenerateRequest, *, was_let_in: bool) -> None:
        """The request has ended."""
        if request.quota is None:
            return
        if not was_let_in:
            self.let_in(request)
        held = self._held[request.quota.name]
        held.num_requests -= 1
        assert held.num_requests >= 0 and held.num_queued_tokens >= 0
        if not held.num_requests:
            del self._held[request.quota.name]
