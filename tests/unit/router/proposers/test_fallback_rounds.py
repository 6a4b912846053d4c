"""A fallback in rounds with a draft model: when it fills in, when it is left off, what it changes."""

from __future__ import annotations

from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.draft_length import PRIOR_ACCEPTANCE
from specray.draft_tokens import DraftTokens
from specray.fakes import FakeDraft, LocalDrafter, NoisyGuesser, PerfectGuesser, ToyModel, VirtualClock
from specray.router.proposers.base import Budget
from specray.router.proposers.local import LocalProposer
from specray.router.session.session import Session
from specray.router.session.values import Commit, Lookup
from specray.types import DraftKind
from tests.unit.router.harness import (
    factory,
    fake_draft,
    no_draft,
    request,
    router_config,
    serving,
    speculation_config,
)
from tests.unit.router.proposers.harness import (
    CHANGING,
    REPEATING,
    of_source,
    serve_and_ask,
    target_of,
    truth,
)


def test_without_a_draft_the_fallback_proposes() -> None:
    given = [request("a", max_tokens=60)]
    _, plain = serve_and_ask(REPEATING, given, make_drafter=no_draft)
    _, filled = serve_and_ask(REPEATING, given, make_drafter=no_draft, fallback="ngram")
    assert plain.target.num_steps == 60
    assert filled.target.num_steps < 30
    assert of_source(filled, "fallback")[2] == 60 - filled.target.num_steps
    assert of_source(filled, "model") == (0, 0, 0)


def test_first_round_carries_a_fallback_with_the_prompt() -> None:
    """The prompt goes round twice: the step that reads it verifies what follows as well."""
    circle = (5, *REPEATING.generate((5,), 20))
    _, pair = serve_and_ask(
        REPEATING,
        [request("a", circle, 4)],
        draft=fake_draft(PerfectGuesser(REPEATING)),
        fallback="ngram",
        num_speculative_tokens=3,
        overlap="serial",
    )
    assert of_source(pair, "fallback") == (1, 3, 3)
    assert pair.target.num_steps == 1


def only_short_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.router.proposers.local.LONG_MATCH_LEN", 1000)


def test_models_first_proposal_holds_where_it_agrees_with_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft answers the prompt while the target verifies the fallback; what goes beyond it is used.

    6 tokens take the draft 24 ms and the verify 20, so that the answer comes after the verdict.
    """
    only_short_matches(monkeypatch)
    circle = (5, *REPEATING.generate((5,), 20))
    _, pair = serve_and_ask(
        REPEATING,
        [request("a", circle, 9)],
        draft=fake_draft(PerfectGuesser(REPEATING)),
        fallback="ngram",
        num_speculative_tokens=6,
        overlap="serial",
    )
    # 3 of the fallback (its first try) and one more; the model's first 4 are the same, its other 2 follow.
    # The last one is the fallback's again.
    assert of_source(pair, "fallback") == (2, 4, 4)
    assert pair.counted("specray_outcomes_total", result="late_hit") == 1
    assert of_source(pair, "model") == (1, 2, 2)


def test_fallback_that_is_never_right_is_left_off() -> None:
    given = [request(str(index), tuple([1, 2, 3] * 20), 100) for index in range(3)]
    _, plain = serve_and_ask(CHANGING, given, make_drafter=no_draft, target=target_of(CHANGING, 0.002))
    _, filled = serve_and_ask(
        CHANGING, given, make_drafter=no_draft, fallback="ngram", target=target_of(CHANGING, 0.002)
    )
    rounds, tokens, accepted = of_source(filled, "fallback")
    assert 0 < rounds <= 12
    assert filled.target.num_rows - plain.target.num_rows == tokens - accepted


def test_a_short_match_goes_before_a_working_draft_model_once_it_has_been_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_short_matches(monkeypatch)
    draft = fake_draft(PerfectGuesser(REPEATING))
    given = [request("a", max_tokens=60)]
    _, pair = serve_and_ask(
        REPEATING, given, draft=draft, fallback="ngram", overlap="serial", num_speculative_tokens=3
    )
    # It is followed while the draft proposes.
    assert of_source(pair, "model")[0] == 2
    assert of_source(pair, "fallback") == (13, 39, 39)


def test_fallback_saves_asking_the_model_after_a_long_match() -> None:
    """As many rounds, without the draft's time in those that a repetition fills."""
    given = [request("a", max_tokens=60)]
    options: dict[str, Any] = {"overlap": "serial", "num_speculative_tokens": 3}
    asked, model = serve_and_ask(REPEATING, given, draft=fake_draft(PerfectGuesser(REPEATING)), **options)
    filled, both = serve_and_ask(
        REPEATING, given, draft=fake_draft(PerfectGuesser(REPEATING)), fallback="ngram", **options
    )
    assert filled[0].token_ids == asked[0].token_ids == truth(REPEATING, given[0])
    assert of_source(both, "fallback") == (13, 39, 39)
    assert of_source(both, "model")[0] + 13 == of_source(model, "model")[0]
    assert both.draft.num_steps < model.draft.num_steps - 10


def test_long_matches_are_believed_apart_from_short_ones() -> None:
    controller = Controller(speculation_config(overlap="serial", fallback="ngram"))
    for rows in (1, 2, 4, 8, 16, 32, 64):
        controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
    local = factory(controller, fallback="ngram").local(request(), DraftKind.MODEL)
    assert local is not None
    short, long = (tokens_of(local, is_long=is_long) for is_long in (False, True))
    assert short < 1.5 < 4.5 < long
    missed = Commit((1,), (), 5, 0, 0, Lookup.NOT_ASKED, local.source, depth=5)
    for _ in range(200):
        local.observe(Session(request(), None, vocab_size=64), missed)
    assert tokens_of(local, is_long=True) < 1.1
    assert tokens_of(local, is_long=False) == short


def test_nothing_is_planned_for_a_session_that_repeats_nothing() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    controller.cost_model.target.add(1, 0.020, is_overlapped=False)
    drafts = factory(controller, fallback="ngram")
    for prompt, is_planned in (((1, 2, 3, 4), False), ((1, 2, 3, 1, 2), True)):
        asked = request(prompt=prompt)
        local = drafts.local(asked, DraftKind.MODEL)
        assert local is not None
        local.propose(Session(asked, None, vocab_size=64), Budget(0.0, num_running=1))
        assert (local.short.stats.plan is not None) is is_planned


def tokens_of(local: LocalProposer, *, is_long: bool) -> float:
    """Expected of a round with five of its draft tokens."""
    local.is_long = is_long
    return local.expect(DraftTokens((1, 2, 3, 4, 5)), num_running=1)[0]


def test_models_acceptance_is_not_the_fallback() -> None:
    """A fallback that is always wrong in the first round leaves K of a perfect model alone."""
    draft = fake_draft(PerfectGuesser(CHANGING))
    given = [request(str(index), tuple([1, 2, 3] * 20), 40) for index in range(4)]
    _, pair = serve_and_ask(
        CHANGING, given, draft=draft, fallback="ngram", overlap="serial", num_speculative_tokens=3
    )
    drafts, tokens, accepted = of_source(pair, "model")
    assert drafts > 0
    assert tokens == accepted
    assert of_source(pair, "fallback")[2] == 0


def test_miss_is_filled_only_where_that_promises_more_than_a_fresh_proposal() -> None:
    """A slow draft that is always wrong, in overlapped rounds over text that repeats itself."""
    given = [request("a", max_tokens=120)]
    wrong = fake_draft(PerfectGuesser(ToyModel(salt=3)))
    options: dict[str, Any] = {"draft": wrong, "overlap": "enumerate", "num_speculative_tokens": 3}
    _, asked = serve_and_ask(REPEATING, given, **options)
    _, filled = serve_and_ask(REPEATING, given, fallback="suffix", **options)
    assert filled.target.num_steps < asked.target.num_steps / 2
    assert of_source(filled, "fallback")[2] > 60


def test_miss_is_asked_for_where_a_fresh_proposal_promises_more() -> None:
    """A fast draft that is often right, and lookups that are right once in four times."""
    guessable = ToyModel(vocab_size=4)
    draft = FakeDraft(NoisyGuesser(guessable), cost=lambda steps: int(steps * 0.0003 * 1e9))
    _, pair = serve_and_ask(
        guessable,
        [request("a", (3, 1, 2), 300)],
        draft=draft,
        fallback="suffix",
        overlap="enumerate",
        num_speculative_tokens=3,
    )
    misses = sum(
        pair.counted("specray_outcomes_total", result=f"{when}miss{cause}")
        for when, cause in (("", "_token"), ("", "_count"), ("late_", ""))
    )
    assert misses > 4
    assert of_source(pair, "fallback")[0] <= 1


async def test_draft_that_is_late_is_filled_in_for(clock: VirtualClock) -> None:
    """From its fourth batch on the draft says nothing: no round after that is without draft tokens."""

    draft = fake_draft(PerfectGuesser(REPEATING))
    async with serving(
        clock,
        target=target_of(REPEATING),
        make_drafter=lambda number: LocalDrafter(draft, clock, hangs_after=3),
        config=router_config(round_timeout_s=5),
        fallback="ngram",
        overlap="enumerate",
        num_speculative_tokens=3,
    ) as pair:
        circle = (5, *REPEATING.generate((5,), 20))
        await pair.router.complete(request("a", circle, 60))
        assert of_source(pair, "fallback")[0] > 8
        assert pair.counted("specray_rounds_total") == pair.counted("specray_spec_decode_num_drafts_total")


def test_fallback_say_nothing_about_the_draft_model() -> None:
    given = [request("a", tuple([1, 2, 3] * 20), 200)]
    _, pair = serve_and_ask(CHANGING, given, make_drafter=no_draft, fallback="ngram")
    assert of_source(pair, "fallback")[0] > 0
    assert pair.router.controller.start_session(request("b")).acceptance.value == PRIOR_ACCEPTANCE
