"""Requests that a Router serves with a target and a drafter of its features in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target.engine import TargetEngine
from specray.engine_info import EngineInfo
from specray.fakes import LocalDrafter, LocalVerifier, VirtualClock
from specray.interfaces import Drafter
from specray.requests import GenerateRequest
from specray.types import DraftReplies, SamplingParams, SpeculateItem, TargetReplies, Verdict, VerifyItem
from tests.unit.engine.features.targets import Session, generate, make_target
from tests.unit.router.harness import request, run, serving

PROMPTS = {"short": [5, 6, 7], "long": [(7 * index) % 90 + 3 for index in range(40)], "single": [11]}
NUM_OUTPUT = 24
K = 3
COUPLED = {"temperature": 30.0, "seed": 11}


@dataclass
class TimedTarget:
    """The target with steps of 20 ms, and verdicts that may lose their features."""

    engine: TargetEngine
    lost: Sequence[int] = ()
    """Numbers of the steps whose features are lost."""
    asked: list[VerifyItem] = field(default_factory=list)
    num_steps: int = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        self.num_steps += 1
        self.asked += items
        replies = replace(self.engine.verify(items), forward_ns=20_000_000)
        if self.num_steps not in self.lost:
            return replies
        kept = tuple(
            replace(reply, features=None) if isinstance(reply, Verdict) else reply
            for reply in replies.replies
        )
        return replace(replies, replies=kept)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


@dataclass
class TimedDraft:
    """The draft with steps of 4 ms."""

    engine: FeatureDraftEngine
    items: list[SpeculateItem] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.items += items
        return replace(self.engine.speculate(items), forward_ns=4_000_000)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


def written_alone(path: Path) -> dict[tuple[str, bool], tuple[int, ...]]:
    """What a target writes by itself: of each prompt, greedy and coupled."""
    target, outputs = make_target(path, None), {}
    for name, prompt in PROMPTS.items():
        for is_greedy in (True, False):
            sampling = SamplingParams(temperature=0.0) if is_greedy else SamplingParams(**COUPLED)
            sampling = replace(sampling, num_prompt_tokens=len(prompt))
            session = Session(f"{name} {is_greedy}", list(prompt), sampling)
            outputs[name, is_greedy] = tuple(generate(target, session, NUM_OUTPUT, 0))
            target.release([session.request_id])
    return outputs


def requests(is_greedy: bool) -> list[GenerateRequest]:
    sampling: dict[str, Any] = {} if is_greedy else COUPLED
    return [request(name, prompt, NUM_OUTPUT, **sampling) for name, prompt in PROMPTS.items()]


def serve(
    engines: tuple[TargetEngine, FeatureDraftEngine],
    alone: dict[tuple[str, bool], tuple[int, ...]],
    *,
    is_greedy: bool = False,
    lost: Sequence[int] = (),
    dies_after: int | None = None,
    together: bool = False,
    **options: Any,
) -> tuple[TimedTarget, TimedDraft, float]:
    """Serves all requests, one after the other or together; returns the number of accepted tokens, too."""
    clock = VirtualClock()
    target, draft = TimedTarget(engines[0], lost), TimedDraft(engines[1])

    def lease(number: int) -> Drafter:
        # The next one has lost what the one before was told.
        draft.engine.release(list(PROMPTS))
        return LocalDrafter(draft, clock, dies_after=dies_after if number == 0 else None)

    async def main() -> float:
        verifier = LocalVerifier(target, clock)
        async with serving(
            clock, verifier=verifier, make_drafter=lease, num_speculative_tokens=K, **options
        ) as pair:
            given = requests(is_greedy)
            outputs = (
                await asyncio.gather(*map(pair.router.complete, given))
                if together
                else [await pair.router.complete(each) for each in given]
            )
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == alone[each.request_id, is_greedy], each.request_id
            return pair.counted("specray_spec_decode_num_accepted_tokens_total")

    accepted = run(clock, main())
    target.engine.check_integrity()
    draft.engine.check_integrity()
    draft.engine.release(list(PROMPTS))
    assert target.info.num_blocks_in_use == draft.info.num_blocks_in_use == 0
    return target, draft, accepted
