"""Differences between draft and target on the wire; all other transport code is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, Generic, Literal, Protocol, TypeVar, runtime_checkable

from specray.engine_info import EngineInfo
from specray.errors import ConfigError, InvalidRequestError
from specray.interfaces import AdapterLoading, SyncAdapterEngine, SyncDraftEngine, SyncTargetEngine
from specray.rpc.codec import draft as draft_codec
from specray.rpc.codec import target as target_codec
from specray.rpc.codec.values import InfoMessage, RequestBatch, parse
from specray.rpc.pb import draft_pb2, target_pb2
from specray.types import ADAPTER, DraftReplies, SpeculateItem, TargetReplies, VerifyItem

RoleName = Literal["draft", "target"]


class Item(Protocol):
    """Fields of an item that the transport uses; the rest is between router and engine."""

    @property
    def request_id(self) -> str: ...
    @property
    def round_id(self) -> int: ...
    @property
    def base_len(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Item)
RepliesT = TypeVar("RepliesT", bound=DraftReplies | TargetReplies)


@dataclass(frozen=True, slots=True)
class EngineService(Generic[ItemT, RepliesT]):
    """One engine's service: names, codec, and how its requests are batched."""

    name: RoleName
    service: str
    """Full name of the gRPC service and of its health status."""
    stream_method: str
    info_method: str
    merges_requests: bool
    """True if requests of several routers are merged into one engine call."""
    encode_request: Callable[[Sequence[ItemT], Sequence[str]], bytes]
    decode_request: Callable[[bytes], RequestBatch[ItemT]]
    encode_replies: Callable[[RepliesT], bytes]
    decode_replies: Callable[[bytes], RepliesT]
    info_message: InfoMessage
    """Type of the answer of ``info_method``."""
    no_replies: RepliesT
    num_tokens: Callable[[ItemT], int]
    """Maximum tokens that the engine computes for an item."""
    drain_notice: RepliesT | None
    """Message that asks a router to lease another engine; None: there is no other."""
    calls: Mapping[str, Callable[[SyncAdapterEngine, bytes], bytes | Aside]] = field(default_factory=dict)
    """Methods of one message each way, by name: they run between two engine calls."""

    @property
    def stream_path(self) -> str:
        return f"/{self.service}/{self.stream_method}"

    @property
    def info_path(self) -> str:
        return f"/{self.service}/{self.info_method}"


@dataclass(frozen=True, slots=True)
class Aside:
    """What is left of a call: work on another thread, while the engine goes on, and its end."""

    work: Callable[[], object]
    end: Callable[[], bytes]
    """Runs between two engine calls, and answers."""


@dataclass(frozen=True, slots=True)
class BoundEngine(Generic[ItemT, RepliesT]):
    """An engine with its verb as ``run``; see :mod:`specray.interfaces` for the contract."""

    read_info: Callable[[], EngineInfo]
    run: Callable[[Sequence[ItemT]], RepliesT]
    release: Callable[[Sequence[str]], None]
    check: Callable[[], None]
    close: Callable[[], None]
    """Last call, which releases what is outside the process, such as the other ranks."""
    advance: Callable[[], bool] = lambda: False
    """Does work that is expected but not asked for yet; returns whether there was any."""
    adapters: SyncAdapterEngine | None = None
    """What loads adapters; None: the engine knows none."""


@runtime_checkable
class _Closeable(Protocol):
    def close(self) -> None: ...


def _close(engine: object) -> None:
    if isinstance(engine, _Closeable):
        engine.close()


def bind_draft(engine: SyncDraftEngine) -> BoundEngine[SpeculateItem, DraftReplies]:
    close = partial(_close, engine)
    return BoundEngine(lambda: engine.info, engine.speculate, engine.release, engine.check, close)


def bind_target(engine: SyncTargetEngine) -> BoundEngine[VerifyItem, TargetReplies]:
    close = partial(_close, engine)
    adapters = engine if isinstance(engine, SyncAdapterEngine) else None
    return BoundEngine(
        lambda: engine.info, engine.verify, engine.release, engine.check, close, adapters=adapters
    )


def _num_draft_tokens(item: SpeculateItem) -> int:
    num_lines = sum(item.fanout) or 1
    if item.max_branches:
        num_lines = min(num_lines, item.max_branches)
    return (
        len(item.token_ids) + len(item.proposed_token_ids) + num_lines * max(0, item.num_speculative_tokens)
    )


def _num_verified_tokens(item: VerifyItem) -> int:
    return len(item.token_ids) + len(item.draft.token_ids)


def _load_adapter(engine: SyncAdapterEngine, data: bytes) -> Aside:
    request = parse(target_pb2.LoadAdapterRequest, data)
    loading = engine.start_loading(request.folder, request.digest)
    return Aside(loading.read, partial(_place_adapter, loading))


def _place_adapter(loading: AdapterLoading) -> bytes:
    try:
        digest = loading.place()
    except ConfigError as error:
        raise InvalidRequestError(str(error), field=ADAPTER) from None
    return target_pb2.LoadAdapterResponse(digest=digest).SerializeToString()


def _unload_adapter(engine: SyncAdapterEngine, data: bytes) -> bytes:
    engine.unload_adapter(parse(target_pb2.UnloadAdapterRequest, data).digest)
    return target_pb2.UnloadAdapterResponse().SerializeToString()


LOAD_ADAPTER: Final = "LoadAdapter"
UNLOAD_ADAPTER: Final = "UnloadAdapter"

DRAFT: Final[EngineService[SpeculateItem, DraftReplies]] = EngineService(
    name="draft",
    service="specray.v1.DraftService",
    stream_method="Speculate",
    info_method="GetDraftInfo",
    merges_requests=True,
    encode_request=draft_codec.encode_speculate_request,
    decode_request=draft_codec.decode_speculate_request,
    encode_replies=draft_codec.encode_draft_replies,
    decode_replies=draft_codec.decode_draft_replies,
    info_message=draft_pb2.GetDraftInfoResponse,
    no_replies=DraftReplies((), 0),
    num_tokens=_num_draft_tokens,
    drain_notice=DraftReplies((), 0, is_draining=True),
)

TARGET: Final[EngineService[VerifyItem, TargetReplies]] = EngineService(
    name="target",
    service="specray.v1.TargetService",
    stream_method="Verify",
    info_method="GetTargetInfo",
    # One request is one ragged forward, which the router fills up to its token budget.
    merges_requests=False,
    encode_request=target_codec.encode_verify_request,
    decode_request=target_codec.decode_verify_request,
    encode_replies=target_codec.encode_target_replies,
    decode_replies=target_codec.decode_target_replies,
    info_message=target_pb2.GetTargetInfoResponse,
    no_replies=TargetReplies((), 0),
    num_tokens=_num_verified_tokens,
    drain_notice=None,
    calls=MappingProxyType({LOAD_ADAPTER: _load_adapter, UNLOAD_ADAPTER: _unload_adapter}),
)
