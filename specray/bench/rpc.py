"""Measures what lies between engine calls: a worker process with an engine that does nothing, or sleeps."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Literal

from specray.bench.core.turns import in_turns
from specray.config import SpeculationConfig
from specray.draft_tokens import DraftTokens
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.fakes import FakeTarget
from specray.interfaces import SyncTargetEngine
from specray.requests import GenerateRequest
from specray.router import Router, SystemClock
from specray.rpc.connection import GrpcVerifier
from specray.rpc.event_loop import new_event_loop
from specray.rpc.workers.worker import serve_engine
from specray.types import SamplingParams, TargetReplies, Verdict, VerifyItem

NUM_WARMUP = 200
"""Round trips before the measurement."""
TIMEOUT_S = 30.0
NUM_DECODED = 300
"""Output tokens of each request of plain decoding."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Milliseconds from the call of ``verify`` to the return of ``replies``."""

    transport: str
    num_sessions: int
    num_rounds: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Decoding:
    num_sessions: int
    num_tokens: int
    step_ms: float
    token_ms: float
    """Milliseconds from a token of each request to the next; at least a step's."""


def measure_rpc(
    *,
    transport: Literal["unix", "tcp"] = "unix",
    num_sessions: int = 1,
    num_rounds: int = 2000,
    num_draft_tokens: int = 4,
) -> RoundTrip:
    """Round trips of a batch, one at a time, through client, server and engine thread.

    Args:
        transport: a unix socket, or TCP on the loopback.
        num_sessions: items of each batch.
        num_rounds: round trips that are measured.
        num_draft_tokens: draft tokens per item; as many tokens are appended.
    """
    with tempfile.TemporaryDirectory(prefix="specray-") as directory:
        address = f"unix:{directory}/target" if transport == "unix" else "127.0.0.1:0"
        process, address = _start_worker(address)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                times = runner.run(_measure(address, num_sessions, num_rounds, num_draft_tokens))
        finally:
            process.terminate()
            process.join(TIMEOUT_S)
    times.sort()
    p50, p95, p99 = (1e3 * times[int(len(times) * part)] for part in (0.50, 0.95, 0.99))
    return RoundTrip(transport, num_sessions, num_rounds, p50, p95, p99)


def measure_decoding(*, step_ms: float, num_sessions: int = 1) -> Decoding:
    """Plain decoding by a Router and a worker whose every step sleeps, as it would wait for a GPU.

    Args:
        step_ms: milliseconds of a step.
        num_sessions: requests at a time, at most 64.
    """
    with tempfile.TemporaryDirectory(prefix="specray-") as directory:
        process, address = _start_worker(f"unix:{directory}/target", partial(SleepingTarget, step_ms / 1e3))
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                seconds = runner.run(_decode(address, num_sessions, NUM_DECODED))
        finally:
            process.terminate()
            process.join(TIMEOUT_S)
    return Decoding(num_sessions, NUM_DECODED, step_ms, 1e3 * seconds / NUM_DECODED)


async def _decode(address: str, num_sessions: int, num_tokens: int) -> float:
    """Seconds of the second of two rounds of requests."""
    verifier = await GrpcVerifier.connect(address, timeout_s=TIMEOUT_S)
    plain = SpeculationConfig.model_validate({"num_speculative_tokens": 0})
    router = Router(verifier, None, speculation=plain, clock=SystemClock())
    await router.start()
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=4)
    seconds = 0.0
    for turn, _, _ in in_turns([router], 1, num_warmup=1):
        requests = [
            GenerateRequest(f"{turn}-{index}", (1, 2, 3, index % 64), sampling, num_tokens)
            for index in range(num_sessions)
        ]
        started = time.perf_counter()
        await asyncio.gather(*(router.complete(request) for request in requests))
        seconds = time.perf_counter() - started
    await router.stop()
    await verifier.close()
    return seconds


def _start_worker(
    address: str, make_engine: Callable[[], SyncTargetEngine] | None = None
) -> tuple[BaseProcess, str]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=partial(
            serve_engine, make_engine or NoopTarget, role="target", address=address, on_ready=sender.send
        ),
        daemon=True,
    )
    process.start()
    if not receiver.poll(TIMEOUT_S):
        process.kill()
        raise TimeoutError(f"the worker was not ready within {TIMEOUT_S} s")
    return process, receiver.recv()


async def _measure(address: str, num_sessions: int, num_rounds: int, num_draft_tokens: int) -> list[float]:
    verifier = await GrpcVerifier.connect(address, timeout_s=TIMEOUT_S)
    times: list[float] = []
    for round_id in range(NUM_WARMUP + num_rounds):
        items = _items(round_id, num_sessions, num_draft_tokens)
        started = time.perf_counter()
        await verifier.verify(items)
        await verifier.replies()
        times.append(time.perf_counter() - started)
    await verifier.close()
    return times[NUM_WARMUP:]


def _items(round_id: int, num_sessions: int, num_draft_tokens: int) -> list[VerifyItem]:
    token_ids = tuple(range(1000, 1000 + num_draft_tokens))
    sampling = SamplingParams(num_prompt_tokens=num_draft_tokens) if round_id == 0 else None
    base_len = round_id * num_draft_tokens
    return [
        VerifyItem(
            f"session-{index:04d}", round_id, base_len, token_ids, DraftTokens(token_ids), sampling=sampling
        )
        for index in range(num_sessions)
    ]


class NoopTarget:
    info = EngineInfo(
        role="target",
        model="noop",
        vocab_size=1 << 17,
        tokenizer_fingerprint="",
        block_size=1 << 20,
        num_blocks=1 << 10,
        max_model_len=1 << 20,
        max_num_seqs=1 << 10,
        max_num_batched_tokens=1 << 20,
        protocol_version=PROTOCOL_VERSION,
    )

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        return TargetReplies(
            tuple(
                Verdict(item.request_id, item.round_id, item.base_len, len(item.draft.token_ids), 7)
                for item in items
            ),
            forward_ns=0,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Does nothing: it holds no sequences."""

    def check(self) -> None:
        """Does nothing: it cannot break."""


class SleepingTarget(FakeTarget):
    """Draws a toy model's tokens; its process has nothing to do during a step.

    Args:
        step_s: seconds of a step.
    """

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        """One step."""
        started_ns = time.perf_counter_ns()
        replies = super().verify(items)
        time.sleep(self._step_s)
        return replace(replies, forward_ns=time.perf_counter_ns() - started_ns)
