"""Scripted engines and handlers that fail on command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specray.draft_tokens import DraftTokens
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.requests import FinishReason, ServiceInfo
from specray.rpc.inference.types import GenerateEvent, GenerateParams, TokenUsage
from specray.types import (
    DraftReplies,
    DraftReply,
    ItemFailed,
    Proposal,
    SamplingParams,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    Verdict,
    VerifyItem,
)

DRAFT_INFO = EngineInfo(
    role="draft",
    model="scripted",
    vocab_size=1000,
    tokenizer_fingerprint="f00d",
    block_size=16,
    num_blocks=8,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    protocol_version=PROTOCOL_VERSION,
    dtype="float32",
)
TARGET_INFO = replace(DRAFT_INFO, role="target")
SAMPLING = SamplingParams(seed=7, num_prompt_tokens=3)


@dataclass
class ScriptedEngine:
    """Keeps sequences by the protocol, records its calls, and fails on command.

    A draft proposes ``last token + 1, + 2, ...``; a target accepts exactly these.
    """

    info: EngineInfo
    sequences: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    """Request ids of each engine call."""
    releases: list[tuple[str, ...]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    poison: str = "\0"
    """Request id that makes a call raise."""
    silent: str = "\0"
    """Request id that gets no reply."""
    num_closed: int = 0
    is_broken: bool = False
    """Whether ``check`` raises."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Gate that calls wait for; open from the start."""
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Semaphore released once per call, before it waits at the gate."""

    def __post_init__(self) -> None:
        self.gate.set()

    def _begin(self, items: Sequence[SpeculateItem] | Sequence[VerifyItem]) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(tuple(item.request_id for item in items))
        self.entered.release()
        assert self.gate.wait(10.0)
        if self.is_broken or self.poison in self.calls[-1]:
            raise RuntimeError("scripted failure")

    def _append(self, item: SpeculateItem | VerifyItem) -> UnknownSequence | None:
        kept = self.sequences.get(item.request_id, ())
        if item.base_len > len(kept):
            return UnknownSequence(item.request_id, item.round_id, item.base_len)
        self.sequences[item.request_id] = kept[: item.base_len] + item.token_ids
        return None

    def release(self, request_ids: Sequence[str]) -> None:
        self.threads.add(threading.get_ident())
        self.releases.append(tuple(request_ids))
        for request_id in request_ids:
            self.sequences.pop(request_id, None)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_closed += 1

    def check(self) -> None:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(10.0)
        if self.is_broken:
            raise RuntimeError("scripted breakage")


class ScriptedDraft(ScriptedEngine):
    def __init__(self, info: EngineInfo = DRAFT_INFO) -> None:
        super().__init__(info)

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self._begin(items)
        replies: list[DraftReply] = []
        for item in items:
            if item.request_id == self.silent:
                continue
            unknown = self._append(item)
            if unknown is not None:
                replies.append(unknown)
                continue
            last = self.sequences[item.request_id][-1]
            proposed = tuple(last + 1 + i for i in range(item.num_speculative_tokens))
            replies.append(Proposal(item.request_id, item.round_id, item.base_len, DraftTokens(proposed)))
        return DraftReplies(tuple(replies), forward_ns=1000 + len(items))


class ScriptedTarget(ScriptedEngine):
    def __init__(self, info: EngineInfo = TARGET_INFO) -> None:
        super().__init__(info)

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        self._begin(items)
        replies: list[TargetReply] = []
        for item in items:
            if not item.token_ids:
                failed = ItemFailed(item.request_id, item.round_id, item.base_len, "nothing to do", False)
                replies.append(failed)
                continue
            replies.append(self._append(item) or self._verdict(item))
        num_rows = 100 + sum(len(item.token_ids) for item in items)
        return TargetReplies(tuple(replies), forward_ns=2000 + len(items), num_rows=num_rows)

    def _verdict(self, item: VerifyItem) -> Verdict:
        last = self.sequences[item.request_id][-1]
        num_accepted = 0
        for token_id in item.draft.token_ids:
            if token_id != last + 1 + num_accepted:
                break
            num_accepted += 1
        next_token_id = last + 1 + num_accepted if item.sample else None
        return Verdict(item.request_id, item.round_id, item.base_len, num_accepted, next_token_id)


async def eventually(is_so: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Polls until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def is_there(path: Path) -> bool:
    return path.exists()


def speculate(
    request_id: str,
    *,
    round_id: int = 0,
    base_len: int = 0,
    token_ids: tuple[int, ...] = (1, 2, 3),
    k: int = 2,
) -> SpeculateItem:
    """A short item; with its sampling parameters when it starts a sequence."""
    sampling = SAMPLING if base_len == 0 else None
    return SpeculateItem(request_id, round_id, base_len, token_ids, k, sampling=sampling)


def verify(
    request_id: str,
    *,
    round_id: int = 0,
    base_len: int = 0,
    token_ids: tuple[int, ...] = (1, 2, 3),
    draft: tuple[int, ...] = (),
) -> VerifyItem:
    """A short item; with its sampling parameters when it starts a sequence."""
    sampling = SAMPLING if base_len == 0 else None
    return VerifyItem(request_id, round_id, base_len, token_ids, DraftTokens(draft), sampling=sampling)


SERVICE_INFO = ServiceInfo("tiny", "tiny-draft", 1000, 128, PROTOCOL_VERSION, "0.1.0")


@dataclass
class ScriptedHandler:
    """Answers with one event per prompt token; raises or waits on command."""

    failure: Exception | None = None
    waits_after: int | None = None
    """Number of events after which the answer hangs."""
    seen: list[GenerateParams] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    """Event set when an answer's iterator is closed for any reason."""

    async def generate(self, params: GenerateParams) -> AsyncIterator[GenerateEvent]:
        self.seen.append(params)
        try:
            token_ids = params.token_ids or tuple(range(len(params.text or "")))
            for position, token_id in enumerate(token_ids):
                if position == self.waits_after:
                    await asyncio.Event().wait()
                yield GenerateEvent("r-1", text=f"<{token_id}>", token_ids=(token_id,))
            if self.failure is not None:
                raise self.failure
            usage = TokenUsage(len(token_ids), len(token_ids), len(token_ids) - 1)
            yield GenerateEvent("r-1", finish_reason=FinishReason.STOP, usage=usage)
        finally:
            self.closed.set()

    async def info(self) -> ServiceInfo:
        if self.failure is not None:
            raise self.failure
        return SERVICE_INFO
