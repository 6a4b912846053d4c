"""Differences between draft and target on the wire; all other transport code is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, runtime_checkable

from specray.interfaces import SyncDraftEngine, SyncTargetEngine
from specray.rpc.codec import draft as draft_codec
from specray.rpc.codec import target as target_codec
from specray.rpc.codec.values import RequestBatch
from specray.types import (
    DraftReplies,
    DraftReply,
    EngineInfo,
    ItemFailed,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    VerifyItem,
)

RoleName = Literal["draft", "target"]


class Item(Protocol):
    """Fields of an item that the transport reads; the rest is between router and engine."""

    @property
    def request_id(self) -> str: ...
    @property
    def round_id(self) -> int: ...
    @property
    def base_len(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Item)
ReplyT = TypeVar("ReplyT", bound=Item)
RepliesT = TypeVar("RepliesT")


@dataclass(frozen=True, slots=True)
class EngineRole(Generic[ItemT, ReplyT, RepliesT]):
    """One engine's service: names, codec, and constructors and readers of its reply batches."""

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
    encode_info: Callable[[EngineInfo], bytes]
    decode_info: Callable[[bytes], EngineInfo]
    make_replies: Callable[[tuple[ReplyT, ...], int, int | None], RepliesT]
    read_replies: Callable[[RepliesT], tuple[tuple[ReplyT, ...], int, int | None]]
    """Splits a batch into (replies, forward_ns, num_rows); num_rows is None for a draft."""
    unknown_sequence: Callable[[ItemT], ReplyT]
    item_failed: Callable[[ItemT, str], ReplyT]
    """Makes the reply to an item that can never be served."""
    rename_item: Callable[[ItemT, str], ItemT]
    """Copies an item with another request id."""
    rename_reply: Callable[[ReplyT, str], ReplyT]
    num_tokens: Callable[[ItemT], int]
    """Maximum tokens that the engine computes for an item."""
    drain_notice: RepliesT | None
    """Message that asks a router to lease another engine; None: there is no other."""

    @property
    def stream_path(self) -> str:
        return f"/{self.service}/{self.stream_method}"

    @property
    def info_path(self) -> str:
        return f"/{self.service}/{self.info_method}"


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
    return BoundEngine(lambda: engine.info, engine.verify, engine.release, engine.check, close)


DraftRole = EngineRole[SpeculateItem, DraftReply, DraftReplies]
TargetRole = EngineRole[VerifyItem, TargetReply, TargetReplies]


def _unknown_sequence(item: Item) -> UnknownSequence:
    return UnknownSequence(item.request_id, item.round_id, item.base_len)


def _item_failed(item: Item, message: str) -> ItemFailed:
    return ItemFailed(item.request_id, item.round_id, item.base_len, message, is_retriable=False)


def _rename(message: Any, request_id: str) -> Any:
    return message if message.request_id == request_id else replace(message, request_id=request_id)


def _num_draft_tokens(item: SpeculateItem) -> int:
    num_lines = sum(item.fanout) or 1
    if item.max_branches:
        num_lines = min(num_lines, item.max_branches)
    return (
        len(item.token_ids) + len(item.proposed_token_ids) + num_lines * max(0, item.num_speculative_tokens)
    )


def _num_verified_tokens(item: VerifyItem) -> int:
    return len(item.token_ids) + len(item.draft.token_ids)


DRAFT: Final[DraftRole] = EngineRole(
    name="draft",
    service="specray.v1.DraftService",
    stream_method="Speculate",
    info_method="GetDraftInfo",
    merges_requests=True,
    encode_request=draft_codec.encode_speculate_request,
    decode_request=draft_codec.decode_speculate_request,
    encode_replies=draft_codec.encode_draft_replies,
    decode_replies=draft_codec.decode_draft_replies,
    encode_info=draft_codec.encode_draft_info,
    decode_info=draft_codec.decode_draft_info,
    make_replies=lambda replies, forward_ns, num_rows: DraftReplies(replies, forward_ns),
    read_replies=lambda batch: (batch.replies, batch.forward_ns, None),
    unknown_sequence=_unknown_sequence,
    item_failed=_item_failed,
    rename_item=_rename,
    rename_reply=_rename,
    num_tokens=_num_draft_tokens,
    drain_notice=DraftReplies((), 0, is_draining=True),
)

TARGET: Final[TargetRole] = EngineRole(
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
    encode_info=target_codec.encode_target_info,
    decode_info=target_codec.decode_target_info,
    make_replies=TargetReplies,
    read_replies=lambda batch: (batch.replies, batch.forward_ns, batch.num_rows),
    unknown_sequence=_unknown_sequence,
    item_failed=_item_failed,
    rename_item=_rename,
    rename_reply=_rename,
    num_tokens=_num_verified_tokens,
    drain_notice=None,
)
