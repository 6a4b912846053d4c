"""A request that ends every target that works on it: it is found, ended, and all others go on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from specray.errors import SpecrayError
from specray.fakes import FakeTarget, LocalVerifier, PerfectGuesser, VirtualClock
from specray.interfaces import Verifier
from specray.requests import FinishReason, OutputChunk
from specray.router.admission.sessions import MAX_TARGET_LOSSES
from specray.types import VerifyItem
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    Pair,
    expected,
    fake_draft,
    fake_target,
    in_virtual_time,
    request,
    router_config,
    serving,
)

NUM_OTHERS = 3
NUM_TOKENS = 60


class Mortal(LocalVerifier):
    """A target's connection that is lost over steps that a test names; all steps are kept."""

    def __init__(
        self,
        target: FakeTarget,
        clock: VirtualClock,
        steps: list[tuple[str, ...]],
        ends_over: Callable[[Sequence[VerifyItem]], bool],
    ) -> None:
        super().__init__(target, clock)
        self._steps, self._ends_over = steps, ends_over

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        self._steps.append(tuple(item.request_id for item in items))
        if self._ends_over(items):
            self.lose()
        await super().verify(items, released)


@in_virtual_time
async def serve_beside(
    clock: VirtualClock, ends_over: Callable[[Sequence[VerifyItem]], bool], *, overlap: str = "serial"
) -> tuple[list[OutputChunk | SpecrayError], list[tuple[str, ...]], float]:
    """What ``poison`` and the others get, the steps asked for, and how many targets were lost."""
    steps: list[tuple[str, ...]] = []
    target = fake_target()

    async def connect() -> Verifier:
        target.forget()
        return Mortal(target, clock, steps, ends_over)

    async with serving(
        clock,
        target=target,
        verifier=connect,
        draft=fake_draft(PerfectGuesser(MODEL)),
        config=router_config(start_timeout_s=60),
        overlap=overlap,
        num_speculative_tokens=3,
    ) as pair:
        others = [request(f"other{index}", (index, 7), NUM_TOKENS) for index in range(NUM_OTHERS)]
        calls = [asyncio.create_task(_complete(pair, one.request_id)) for one in others]
        await asyncio.sleep(0.1)
        poison: OutputChunk | SpecrayError
        try:
            poison = await _complete(pair, "poison")
        except SpecrayError as error:
            poison = error
        outputs = await asyncio.gather(*calls)
        assert [output.token_ids for output in outputs] == [expected(one) for one in others]
        late = await _complete(pair, "late")
        assert late.finish_reason is FinishReason.LENGTH
        await pair.settle()
        return [poison, *outputs], steps, pair.counted("specray_target_lost_total")


async def _complete(pair: Pair, request_id: str) -> OutputChunk:
    start = int(request_id[-1]) if request_id[-1].isdigit() else 9
    return await pair.router.complete(request(request_id, (start, 7), NUM_TOKENS))


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
def test_request_that_ends_target_after_target_is_ended_and_no_other_fails(overlap: str) -> None:
    (poison, *_), steps, num_lost = serve_beside(
        lambda items: any(item.request_id == "poison" for item in items), overlap=overlap
    )
    assert num_lost == 3
    assert isinstance(poison, SpecrayError)
    assert str(poison) == "3 targets were lost while they worked on this request"
    fatal = [step for step in steps if "poison" in step]
    assert len(fatal) == 3
    assert len(fatal[0]) > 1 and len(fatal[1]) > 1 and fatal[2] == ("poison",)


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
def test_request_that_was_only_beside_it_is_cleared_by_a_step_of_its_own(overlap: str) -> None:
    _, steps, _ = serve_beside(
        lambda items: any(item.request_id == "poison" for item in items), overlap=overlap
    )
    second = [number for number, step in enumerate(steps) if "poison" in step][1]
    alone = [step[0] for step in itertools.takewhile(lambda step: len(step) == 1, steps[second + 1 :])]
    assert sorted(alone) == sorted(steps[second]), "each of them once, and the others wait"


async def test_session_that_the_lost_target_did_not_work_on_is_not_suspected(clock: VirtualClock) -> None:
    async with serving(clock, has_draft_model=False) as pair:
        calls = [asyncio.create_task(_complete(pair, name)) for name in ("other0", "other1")]
        await asyncio.sleep(1.5 * TARGET_S)
        sessions = pair.router.sessions
        one, other = sessions.running.values()
        for _ in range(MAX_TARGET_LOSSES - 1):
            one.session.target.lose()
            sessions.lose_target(clock.monotonic())
            other.session.verify_item(8)
        assert (one.num_target_losses, other.num_target_losses) == (0, MAX_TARGET_LOSSES - 1)
        assert sessions.suspect() is other
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def test_losses_between_which_a_request_got_on_are_not_held_against_it() -> None:
    number = 0

    def every_fifth(_: Sequence[VerifyItem]) -> bool:
        nonlocal number
        number += 1
        return number % 5 == 0 and number <= 30

    (poison, *_), steps, num_lost = serve_beside(every_fifth, overlap="serial")
    assert poison.finish_reason is FinishReason.LENGTH
    assert num_lost == 6
    assert all(len(step) > 1 for step in steps if "poison" in step and "other0" in step)
