"""Requests that a Router serves over real engines in virtual time, each with the output that is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specray.engine_info import EngineInfo
from specray.fakes import LocalDrafter, LocalVerifier, VirtualClock
from specray.interfaces import Drafter, Verifier
from specray.types import DraftReplies, SpeculateItem, TargetReplies, Verdict, VerifyItem
from tests.unit.router.harness import in_virtual_time, request, serving

NUM_OUTPUT = 24
K = 3
COUPLED: dict[str, Any] = {"temperature": 30.0, "seed": 11}
"""Hot enough that the shared noise decides, so that draft and target often say the same."""
Prompts = Mapping[str, Sequence[int]]
Outputs = Mapping[tuple[str, bool], tuple[int, ...]]
"""By the name of the prompt, and whether it is greedy or coupled."""
Connect = Callable[[], Coroutine[Any, Any, Verifier]]


@dataclass
class _Timed:
    engine: Any

    @property
    def info(self) -> EngineInfo:
        info: EngineInfo = self.engine.info
        return info

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


@dataclass
class TimedTarget(_Timed):
    """The target with steps of 20 ms, and verdicts that may lose their features."""

    lost: Sequence[int] = ()
    """Numbers of the steps whose features are lost."""
    asked: list[VerifyItem] = field(default_factory=list)
    num_steps: int = 0
    num_rows: int = 0

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        self.num_steps += 1
        self.asked += items
        found = replace(self.engine.verify(items), forward_ns=20_000_000)
        self.num_rows += found.num_rows or 0
        if self.num_steps in self.lost:
            replies = (
                replace(each, features=None) if isinstance(each, Verdict) else each for each in found.replies
            )
            found = replace(found, replies=tuple(replies))
        return found


@dataclass
class TimedDraft(_Timed):
    """The draft with steps of 4 ms."""

    items: list[SpeculateItem] = field(default_factory=list)

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.items += items
        return replace(self.engine.speculate(items), forward_ns=4_000_000)


@dataclass(frozen=True)
class Served:
    """What was asked and counted while all requests were served."""

    target: TimedTarget
    draft: TimedDraft
    accepted: float
    drafted: float
    preempted: float


@in_virtual_time
async def serve(
    clock: VirtualClock,
    target: TimedTarget,
    draft: TimedDraft,
    prompts: Prompts,
    expected: Outputs,
    *,
    is_greedy: bool,
    verifier: Callable[[TimedTarget, VirtualClock], Connect] | None = None,
    dies_after: int | None = None,
    together: bool = True,
    **options: Any,
) -> Served:
    """Serves all requests, one after the other or together, and compares each with what is expected.

    Args:
        dies_after: calls after which the first draft is lost; the next one knows nothing.
    """
    sampling = {} if is_greedy else COUPLED
    given = [request(name, prompt, NUM_OUTPUT, **sampling) for name, prompt in prompts.items()]

    def lease(number: int) -> Drafter:
        draft.release(list(prompts))
        return LocalDrafter(draft, clock, dies_after=dies_after if number == 0 else None)

    connection = LocalVerifier(target, clock) if verifier is None else verifier(target, clock)
    options.setdefault("num_speculative_tokens", K)
    async with serving(clock, verifier=connection, make_drafter=lease, **options) as pair:
        if together:
            outputs = await asyncio.gather(*map(pair.router.complete, given))
        else:
            outputs = [await pair.router.complete(each) for each in given]
        for each, output in zip(given, outputs, strict=True):
            assert output.token_ids == expected[each.request_id, is_greedy], each.request_id
        served = Served(
            target,
            draft,
            pair.counted("specray_spec_decode_num_accepted_tokens_total"),
            pair.counted("specray_spec_decode_num_draft_tokens_total"),
            pair.counted("specray_preemptions_total"),
        )
    for timed in (target, draft):
        timed.engine.check_integrity()
    draft.release(list(prompts))
    return served
