"""What was foreseen goes on with a repetition that begins with it, where that is worth its rows."""

from __future__ import annotations

from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.state import OFF, Plan
from specray.draft_tokens import DraftTokens
from specray.drafting import LONG_MATCH_LEN
from specray.engine_info import StepTime
from specray.fakes import FakeDraft, FakeTarget, PerfectGuesser, VirtualClock
from specray.fakes.engines import fake_info
from specray.requests import GenerateRequest, SpeculationParams
from specray.router.fallback import NgramFallback
from specray.router.live_session import LiveSession
from specray.router.output.delivery import Delivery
from specray.router.proposers.local import LocalProposer
from specray.router.session.session import Session
from specray.types import DraftKind, Overlap, Verification
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    factory,
    in_virtual_time,
    request,
    serving,
    speculation_config,
)
from tests.unit.router.proposers.harness import REPEATING

CIRCLE = tuple(range(1, 1 + LONG_MATCH_LEN))
"""What follows it in a prompt that goes round: 1, 2, 3 and so on."""
AHEAD = Plan(2, Overlap.ENUMERATE, 2)


def extended(
    foreseen: tuple[int, ...],
    *,
    rows_s: float = 0.0,
    prompt: tuple[int, ...] = CIRCLE * 3,
    ahead: Plan = AHEAD,
    verification: Verification = Verification.COUPLED,
    k: int | None = None,
    accepted: int = 0,
    accepted_short: int = 0,
) -> DraftTokens | None:
    """What replaces what was foreseen after a hit, with a target of 20 ms a step and so much a row.

    The draft was right ``accepted`` times, what followed short matches ``accepted_short`` times.
    """
    config = speculation_config(fallback="ngram")
    controller = Controller(config)
    sizes = (1, 2, 4, 8, 16, 32, 64)
    controller.cost_model.expect_target([StepTime(rows, 0.02 + rows * rows_s) for rows in sizes], 0.0)
    controller.cost_model.expect_draft([StepTime(rows, 0.0004) for rows in sizes], 0.0)
    wanted = SpeculationParams(num_speculative_tokens=k)
    sampling: dict[str, Any] = {"temperature": 1.0, "verification": verification}
    asked = request(prompt=prompt, max_tokens=60, speculation=wanted, **sampling)
    local = factory(controller, fallback="ngram").local(asked, DraftKind.MODEL)
    assert local is not None
    local.short.stats.acceptance.add(accepted_short, accepted_short)
    session = Session(asked, None, vocab_size=64)
    stats = controller.start_session(asked)
    stats.acceptance.add(accepted, accepted)
    live = LiveSession(session, Delivery("a", is_stream=False), stats, 0.0, 60.0, local=local, ahead=ahead)
    return NgramFallback({"a": live}, controller).extend(live, DraftTokens(foreseen), 0.0)


def test_repetition_that_begins_with_what_was_foreseen_goes_on() -> None:
    drafted = extended((1, 2))
    assert drafted is not None
    assert len(drafted.token_ids) > 6
    assert drafted.token_ids == (CIRCLE * 3)[: len(drafted.token_ids)]


def test_looks_for_repetitions_that_are_not_used_count_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[LocalProposer] = []
    monkeypatch.setattr(LocalProposer, "pass_over", lambda local: passed.append(local))
    extended((1, 2))
    assert not passed
    extended((1, 3))
    assert len(passed) == 1
    # Of a fixed K there is nothing to look for behind K tokens.
    extended((1, 3), k=2)
    assert len(passed) == 1
    extended((1, 3), k=3)
    assert len(passed) == 2


def test_draft_that_foresees_something_else_is_believed() -> None:
    assert extended((1, 3)) is None


def test_rows_that_bring_less_than_the_drafts_are_left_out() -> None:
    """A row takes 25 ms, and a repetition's third token comes in three rounds of four."""
    ahead = Plan(4, Overlap.ENUMERATE, 1)
    assert extended((1, 2), rows_s=0.025, ahead=ahead) == DraftTokens((1, 2, 3))
    # Rounds of a draft that is never wrong bring more in that time.
    assert extended((1, 2), rows_s=0.025, ahead=ahead, accepted=1000) is None


def test_only_a_long_match_goes_on() -> None:
    """Of the last three tokens two have been there before, and what followed it always came again."""
    short = (*CIRCLE, 1, 2, 3, 4, 5, 6, 9, 7, 8)
    assert extended((1, 2), prompt=short, accepted_short=1000) is None
    assert extended((1, 2), prompt=short + CIRCLE, accepted_short=1000) is not None


def test_what_was_not_foreseen_under_a_plan_is_left_as_it_is() -> None:
    assert extended((1, 2), ahead=OFF) is None


def test_by_rejection_what_the_draft_drew_decides_nothing() -> None:
    assert extended((1, 2), verification=Verification.REJECTION) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 1234},
        {"temperature": 1.0, "seed": 9, "verification": Verification.REJECTION},
    ],
    ids=["greedy", "coupled", "rejection"],
)
def test_longer_rounds_commit_the_targets_tokens_and_are_fewer(sampling: dict[str, Any]) -> None:
    """A perfect draft, and an output in circles."""
    given = request("a", max_tokens=200, **sampling)
    num_steps = {fallback: num_window_steps(given, fallback) for fallback in ("none", "ngram")}
    has_extended = num_steps["ngram"] < 0.75 * num_steps["none"]
    assert has_extended is not given.sampling.draws_by_rejection


def test_answer_that_comes_after_the_verdict_goes_on_as_well() -> None:
    """Outcomes take the draft longer than the target's step."""
    given = request("a", max_tokens=200)
    assert num_window_steps(given, "ngram", draft_step_s=0.008) < 0.4 * num_window_steps(
        given, "none", draft_step_s=0.008
    )


@in_virtual_time
async def num_window_steps(
    clock: VirtualClock, given: GenerateRequest, fallback: str, *, draft_step_s: float = DRAFT_STEP_S
) -> int:
    """Of a target whose rows cost little, for all tokens."""
    info = fake_info("target", vocab_size=64)
    target = FakeTarget(REPEATING, info=info, cost=lambda rows: int((0.02 + 0.0005 * rows) * 1e9))
    draft = FakeDraft(PerfectGuesser(REPEATING), cost=lambda steps: int(steps * draft_step_s * 1e9))
    async with serving(clock, target=target, draft=draft, overlap="enumerate", fallback=fallback) as pair:
        output = await pair.router.complete(given)
        seed = 0 if given.sampling.is_greedy else given.sampling.seed
        assert output.token_ids == REPEATING.generate(given.prompt_token_ids, 200, seed)
    return target.num_steps
