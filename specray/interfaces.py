"""Interfaces between the router and all else: drafts, targets, clocks, stop strings and callers.

``router`` and ``rpc`` do not import each other or ``engine``; they meet here. ``specray.fakes`` ships a
scripted implementation of each, and one composition root (``actors``) chooses the real ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from specray.engine_info import EngineInfo
from specray.requests import GenerateRequest, OutputChunk, RequestLife, ServiceInfo
from specray.types import DraftReplies, Grammar, SpeculateItem, TargetReplies, VerifyItem

RepliesT_co = TypeVar("RepliesT_co", covariant=True)


class EngineConnection(Protocol[RepliesT_co]):
    """A connection to one engine: items go out, replies come back, matched by (request_id, round_id).

    Sending does not wait for replies, so that the draft can work while the target verifies. Replies may
    come late, twice, out of order or never; the session drops what it no longer waits for.
    """

    @property
    def info(self) -> EngineInfo:
        """The engine's description from when the connection was made."""
        ...

    async def fetch_info(self) -> EngineInfo:
        """Asks again, for the blocks in use now. Raises EngineLostError."""
        ...

    async def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences on the engine; unknown ids are ignored. Raises EngineLostError."""
        ...

    async def replies(self) -> RepliesT_co:
        """Waits for the next batch of replies; a wait that is cancelled may end the connection.

        Raises:
            EngineLostError: the connection is gone.
        """
        ...

    async def close(self) -> None:
        """Ends the connection; idempotent. A pending ``replies`` raises EngineLostError."""
        ...


class Drafter(EngineConnection[DraftReplies], Protocol):
    """A connection to one draft."""

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        """Sends one batch; the draft frees the sequences ``released`` first.

        Raises:
            EngineLostError: the connection is gone.
        """
        ...


class Verifier(EngineConnection[TargetReplies], Protocol):
    """A connection to one target group (its leader)."""

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        """Sends one batch: one ragged forward, before which the sequences ``released`` are freed.

        Raises:
            EngineLostError: the connection is gone.
        """
        ...


@runtime_checkable
class AdapterLoader(Protocol):
    """What a connection to a target whose engine is a ``SyncAdapterEngine`` has besides."""

    async def load_adapter(self, folder: str, digest: bytes = b"") -> bytes:
        """Loads an adapter, and returns the digest of its bytes.

        Raises:
            InvalidRequestError: it can never be loaded, or the engine knows no adapters.
            OverloadedError: there is no room for it.
            EngineLostError: the connection is gone.
        """
        ...

    async def unload_adapter(self, digest: bytes) -> None:
        """Unloads an adapter, if it is loaded. Raises EngineLostError."""
        ...


class DrafterSource(Protocol):
    """The place where the router leases a draft: with Ray a Serve handle, without Ray a fixed address."""

    async def lease(self) -> Drafter:
        """A fresh connection to a draft. Raises EngineLostError when none is to be had now."""
        ...


class RequestTracer(Protocol):
    """Receives from a router the requests that are traced, each once, when it ends."""

    def request_ended(self, life: RequestLife, now: float) -> None:
        """``now``: the router's clock at this moment. Does not block and does not raise."""
        ...


@runtime_checkable
class DrafterPool(DrafterSource, Protocol):
    """A source with several drafts, among which routers spread."""

    async def lease_better(self, current: Drafter) -> Drafter | None:
        """A fresh connection to a draft that clearly fewer routers share than ``current``.

        Returns:
            None: ``current`` is as good as any.

        Raises:
            EngineLostError: the drafts could not be asked.
        """
        ...


class Clock(Protocol):
    """The only clock that router code may read, so that tests and simulations can own time."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary origin; they never go back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits in this clock's time."""
        ...


class StopMatcher(Protocol):
    """Watches one output for its stop strings."""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Adds committed tokens; returns the first stop string that they complete, and goes on after it."""
        ...


class StopMatcherFactory(Protocol):
    """Makes the matcher of one request."""

    def __call__(self, stop: Sequence[str], prompt_token_ids: Sequence[int]) -> StopMatcher: ...


class OutputGrammar(Protocol):
    """What a router asks of one request's grammar. Never raises: where it is lost, it knows nothing."""

    def count_legal(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow the output, one after the other; all where it knows nothing."""
        ...

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """The tokens, at most ``limit``, that must follow the output; none where it knows nothing."""
        ...


class OutputGrammarFactory(Protocol):
    """Makes what a router asks of one request's grammar, without holding up the event loop."""

    async def __call__(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> OutputGrammar: ...


class SyncEngine(Protocol):
    """The synchronous engine of a worker; one thread calls it."""

    @property
    def info(self) -> EngineInfo:
        """The engine's description as of now. Any thread may ask; all else is for the engine's own."""
        ...

    def release(self, request_ids: Sequence[str]) -> None: ...

    def check(self) -> None:
        """Runs a real one-token step; raises when the engine is broken."""
        ...


class SyncDraftEngine(SyncEngine, Protocol):
    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        """One batch to completion. Bad items answer ItemFailed or UnknownSequence; never raises for them."""
        ...


class SyncTargetEngine(SyncEngine, Protocol):
    """The engine of a target's leader."""

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        """One ragged forward. Bad items answer ItemFailed or UnknownSequence; never raises for them."""
        ...


class AdapterLoading(Protocol):
    """An adapter on its way into an engine's memory."""

    def read(self) -> None:
        """Reads and checks its files, on any thread, while steps go on."""
        ...

    def place(self) -> bytes:
        """Puts what was read into memory, between two steps; returns the digest of its bytes.

        Raises:
            ConfigError: it can never be loaded, or has other bytes; nothing has changed.
            OverloadedError: there is no room for it; nothing has changed.
        """
        ...


@runtime_checkable
class SyncAdapterEngine(Protocol):
    """A target's engine that loads adapters while it serves, between two steps, one after the other.

    It lists them in ``info`` (``adapters``, ``adapter_names``, ``max_adapters``, ``max_adapter_rank``). A
    sequence whose adapter is not loaded is answered with ``ItemFailed(is_retriable=True, field="adapter")``;
    an adapter stays as long as a sequence uses it. Who has others loaded makes room first.
    """

    def start_loading(self, folder: str, digest: bytes = b"") -> AdapterLoading:
        """Begins to load an adapter on all ranks, where it is not loaded.

        Args:
            folder: name of its folder in ``target.adapters.directory``.
            digest: what its bytes must be, 32 bytes; empty: whatever they are.

        Raises:
            ConfigError: the engine knows none.
        """
        ...

    def unload_adapter(self, digest: bytes) -> None:
        """Lets an adapter leave memory, once no sequence uses it; an unknown one is ignored."""
        ...


@runtime_checkable
class AdapterManager(Protocol):
    """A router whose target loads adapters, or a handle to several such."""

    async def load_adapter(self, folder: str, digest: bytes = b"", *, is_pinned: bool = False) -> bytes:
        """Loads an adapter once there is room, and returns the digest of its bytes.

        Args:
            is_pinned: it leaves only when it is unloaded.
        """
        ...

    async def unload_adapter(self, digest: bytes) -> None:
        """Unloads an adapter, if it is loaded. Raises EngineLostError."""
        ...


class RouterClient(Protocol):
    """The router as an ingress sees it: the router itself is one, a Serve handle to it is another."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """The whole output as one chunk. Cancelling the call aborts the request.

        Raises:
            OverloadedError: queues are full.
            EngineLostError: the target was lost; the request may be retried.
            InvalidRequestError: the request does not fit the served model.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """The output in chunks as it is committed; closing the iterator aborts. Raises like ``complete``."""
        ...

    async def service_info(self) -> ServiceInfo:
        """Returns the served models, and the limits."""
        ...

    async def check_ready(self) -> None:
        """Raises EngineLostError unless a real step of the target succeeds within its deadline."""
        ...

    async def metrics_text(self) -> str:
        """All metrics in Prometheus text format."""
        ...

    async def trace_text(self) -> str | None:
        """The last decisions and messages as JSON lines, oldest first; None: there are none."""
        ...
