"""What the router does while experiments run: whom it asks for drafts, and which steps it shows them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.experiments import PLAIN_STEPS
from specray.control.mode import ModeController
from specray.control.state import OFF, SessionStats
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser, PerfectGuesser, ToyModel, VirtualClock
from specray.fakes.engines import fake_info
from specray.requests import SpeculationParams
from specray.types import DraftKind
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    expected,
    fake_draft,
    in_virtual_time,
    no_draft,
    request,
    router_config,
    serving,
)


def test_where_all_decode_plainly_nobody_has_fallback_but_who_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModeController, "is_plain", property(lambda self: True))
    # It goes round in a circle, and so does what is looked up.
    circle = ToyModel(vocab_size=8, context_len=1)

    target = FakeTarget(circle, info=fake_info("target", vocab_size=64))

    @in_virtual_time
    async def num_rounds(clock: VirtualClock, make_drafter: Any = None, **speculation: DraftKind) -> float:
        options: dict[str, Any] = {"make_drafter": make_drafter, "fallback": "ngram", "overlap": "serial"}
        async with serving(clock, target=target, num_speculative_tokens="auto", **options) as pair:
            wanted = SpeculationParams(**speculation)
            given = [request(name, max_tokens=60, speculation=wanted) for name in ("a", "b")]
            for output in await asyncio.gather(*map(pair.router.complete, given)):
                assert output.token_ids == circle.generate(given[0].prompt_token_ids, 60, 0)
            return pair.counted("specray_rounds_total") / len(given)

    # With the draft model there are its tokens alone; here it is asked next to nothing.
    monkeypatch.setattr(Controller, "plan", lambda *_, **__: OFF)
    assert num_rounds() == 60
    monkeypatch.undo()
    monkeypatch.setattr(ModeController, "is_plain", property(lambda self: True))
    assert num_rounds(draft=DraftKind.NGRAM) < 15
    # Without a draft nothing is decided, and nothing tried.
    assert num_rounds(no_draft) < 15


async def test_a_session_with_a_fallback_uses_modele_with_draft_tokens(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    add = ModeController.add

    def noted(self: ModeController, stats: SessionStats, *, is_drafted: bool = False) -> None:
        seen.append(is_drafted)
        add(self, stats, is_drafted=is_drafted)

    monkeypatch.setattr(ModeController, "add", noted)
    circle = ToyModel(vocab_size=8, context_len=1)
    target = FakeTarget(circle, info=fake_info("target", vocab_size=64), cost=lambda rows: 20_000_000)
    async with serving(clock, target=target, fallback="ngram", overlap="serial") as pair:
        await pair.router.complete(request("a", max_tokens=60))
        names = ("specray_spec_decode_num_drafts_by_source_total",)
        num_filled, num_modelled = tuple(
            sum(pair.counted(name, source=source) for name in names) for source in ("fallback", "model")
        )
    assert num_filled > 0
    # The first round has no plan yet, and takes no part.
    assert num_filled + num_modelled - 1 <= sum(seen) <= num_filled + num_modelled


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_while_plain_decoding_is_tried_nothing_is_asked_of_the_draft_but_for_a_fixed_k(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModeController, "is_trying_plain", property(lambda self: True))

    @in_virtual_time
    async def draft_steps(clock: VirtualClock, wanted: SpeculationParams) -> int:
        async with serving(clock, overlap=overlap) as pair:
            given = [request(name, max_tokens=30, speculation=wanted) for name in ("a", "b")]
            for output in await asyncio.gather(*map(pair.router.complete, given)):
                assert output.token_ids == expected(given[0])
            return pair.draft.num_steps

    assert draft_steps(SpeculationParams()) == 0
    assert draft_steps(SpeculationParams(num_speculative_tokens=2)) > 10


@pytest.mark.slow
async def test_an_experiment_does_not_wait_for_a_session_that_came_meanwhile_to_end(
    clock: VirtualClock,
) -> None:
    """While two try plain decoding, one ends and another one, which is long, begins: it takes part."""
    draft = fake_draft(PerfectGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="serial") as pair:
        modes, running = pair.router.controller.modes, list[asyncio.Task[object]]()

        def begin(name: str, max_tokens: int) -> None:
            running.append(asyncio.create_task(pair.router.complete(request(name, max_tokens=max_tokens))))

        for number in range(10_000):
            if modes.is_trying_plain:
                break
            if all(task.done() for task in running[-2:]):
                begin(f"a {number}", 2000)
                begin(f"b {number}", 2000)
            await asyncio.sleep(TARGET_S)
        assert modes.is_trying_plain
        running[-1].cancel()
        begin("late", 300)
        # The rest of the experiment and its unsettled steps, with time for the newcomer's prompt.
        await asyncio.sleep((PLAIN_STEPS + 2) * 4 * TARGET_S)
        assert not modes.is_trying_plain and not running[-1].done()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_a_steps_tokens_and_time_are_those_since_the_step_before(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float | None, bool, int, int, int]] = []

    def end_step(self: ModeController, seconds: float | None, **step: int) -> None:
        seen.append((seconds, bool(step["is_reading"]), *list(step.values())[1:]))

    monkeypatch.setattr(ModeController, "end_step", end_step)
    async with serving(clock, has_draft_model=False) as pair:
        first = [request(name, max_tokens=3) for name in ("a", "b")]
        await asyncio.gather(*map(pair.router.complete, first))
        await asyncio.sleep(5.0)
        await pair.router.complete(request("c", max_tokens=2))
    assert not any(is_reading for _, is_reading, *_ in seen)
    took = pytest.approx(TARGET_S)
    # What fills in a prompt, and what follows a pause, shows nothing.
    assert seen == [
        (None, False, 2, 2, 2),
        (took, False, 2, 2, 2),
        (took, False, 2, 2, 2),
        (None, False, 1, 1, 1),
        (took, False, 1, 1, 1),
    ]


async def test_steps_with_prompts_show_nothing_and_those_beside_which_the_draft_reads_say_so(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, bool]] = []

    def end_step(self: ModeController, seconds: float | None, *, is_reading: bool, **_: int) -> None:
        seen.append((seconds is None, is_reading))

    monkeypatch.setattr(ModeController, "end_step", end_step)
    # The prompt is long enough to be read in pieces by a draft that takes its time for each.
    draft = FakeDraft(NoisyGuesser(MODEL), cost=lambda steps: int(steps * 4e6))
    config = router_config(prefill_chunk_tokens=16)
    async with serving(clock, draft=draft, overlap="serial", config=config) as pair:
        first = asyncio.create_task(pair.router.complete(request("a", max_tokens=40)))
        await asyncio.sleep(0.2)
        before = len(seen)
        await pair.router.complete(request("b", tuple([1, 2, 3] * 100), 4))
        await first
        during = seen[before:]
        # Nothing shows that is filled in; the draft has read at the same time.
        assert sum(is_prompt for is_prompt, _ in during) >= 300 // 16
        assert any(is_reading for _, is_reading in during)
        assert not any(is_prompt for is_prompt, _ in seen[1:before])
