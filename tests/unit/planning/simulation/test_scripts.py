"""Tests of scripts: tokens of simulated engines, drawn by rates or repeated from measured outputs."""

from __future__ import annotations

import random

import pytest

from specray.planning.profile import AcceptanceProfile, HitRate, MeasuredOutput
from specray.planning.simulation.scripts import GUESS, WRONG, ReplayedScript, Scripts
from specray.types import SpeculateItem
from tests.unit.planning.parts import acceptance, output, replayed

RNG = random.Random(3)


def script_of(measured: MeasuredOutput) -> ReplayedScript:
    script = Scripts(replayed(measured)).of("a")
    assert isinstance(script, ReplayedScript)
    return script


def test_next_tokens_are_foreseen_as_often_as_was_measured() -> None:
    rates = tuple(HitRate(width=width, rate=rate, num_lookups=9) for width, rate in ((1, 0.5), (2, 0.7)))
    profile = AcceptanceProfile(temperature=0, by_position=(0.0,), num_rounds=9, hit_rates=rates)
    rng, script = random.Random(3), Scripts(profile).of("a")
    ranks = [script.verdict(rng, 0, (GUESS, GUESS)) for _ in range(20_000)]
    assert {accepted for accepted, _ in ranks} == {0}
    counts = [sum(token == rank for _, token in ranks) / 20_000 for rank in (1, 2)]
    assert counts == [pytest.approx(0.5, abs=0.02), pytest.approx(0.2, abs=0.02)]
    assert WRONG in {token for _, token in ranks}


def test_proposal_is_right_where_the_drafts_was_and_wrong_from_there_on() -> None:
    script = script_of(output("1101"))
    assert script.proposal(0, 4, 0.0) == (3, 4, WRONG, WRONG)
    assert script.proposal(2, 2, 0.0) == (WRONG, WRONG)
    assert script.proposal(3, 1, 0.0) == (6,)


def test_verdict_keeps_what_the_output_has_whoever_proposed_it() -> None:
    script = script_of(output("1101"))
    assert script.verdict(RNG, 0, script.proposal(0, 4, 0.0)) == (2, 5)
    # The draft would have been wrong here; a fallback was right.
    assert script.verdict(RNG, 2, (5, 6)) == (2, 3 + 6)
    assert script.verdict(RNG, 0, ()) == (0, 3)


def test_behind_its_end_an_output_begins_again_with_tokens_that_were_not_there() -> None:
    script = script_of(output("10", prompt=(1, 2, 1)))
    tokens = [script.verdict(RNG, position, ())[1] for position in range(6)]
    assert tokens == [3, 4, 7, 8, 11, 12]
    # What the draft was good for repeats.
    assert script.proposal(2, 2, 0.0) == (7, WRONG)


def test_proposal_ends_where_the_draft_ended_it_and_between_bounds_in_between() -> None:
    lengths = [{"min_acceptance": 0.1, "by_position": "b1"}, {"min_acceptance": 0.4, "by_position": "31"}]
    script = script_of(output("11", lengths=lengths))

    def length(min_acceptance: float, most: int = 16, position: int = 0) -> int:
        return len(script.proposal(position, most, min_acceptance))

    assert [length(0.1), length(0.4), length(0.4, position=1)] == [11, 3, 1]
    # Halfway by factors.
    assert length(0.2) == 7
    assert [length(0.02), length(0.9), length(0.1, most=5)] == [11, 3, 5]
    assert length(0.0) == 16


def test_prompt_is_the_end_of_the_measured_one_and_before_that_repeats_nothing() -> None:
    script = script_of(output("1", prompt=(1, 2, 1)))
    assert script.prompt(2) == (2, 1)
    longer = script.prompt(5)
    assert longer[2:] == (1, 2, 1) and len(set(longer[:2]) | {1, 2}) == 4


def test_branches_hold_the_next_token_where_the_draft_would_have_listed_it() -> None:
    measured = replayed(output("1101")).model_copy(
        update={
            "hit_rates": (
                HitRate(width=1, rate=0.0, num_lookups=9),
                HitRate(width=2, rate=1.0, num_lookups=9),
            )
        }
    )
    script = Scripts(measured).of("a")
    item = SpeculateItem("a", 1, 0, (1,), 2, (3, 4, WRONG), (2, 2, 2, 2))
    found = {
        (one.num_accepted_tokens, one.next_token_id): one.draft.token_ids for one in script.branches(0, item)
    }
    # Two are accepted, and what comes then was never its first guess: it is the second.
    assert found[2, 5] == (6, 9)
    assert [key for key in found if key[0] == 3 and key[1] < 100] == []
    whole = SpeculateItem("a", 1, 0, (1,), 1, (3,), (0, 1))
    # All of it is accepted, and the draft would have proposed the next token: its first guess.
    assert [(one.num_accepted_tokens, one.next_token_id) for one in script.branches(0, whole)] == [(1, 4)]


def test_requests_differ_in_the_output_that_they_are_given_unless_they_are_replayed_in_turns() -> None:
    profile = replayed(output("1"), output("0"))
    scripts = Scripts(profile)
    kept = [len(scripts.of(f"request-{n}").proposal(0, 1, 0.0)) for n in range(3)]
    assert kept == [1, 1, 1]
    right = [scripts.of(f"request-{n}").proposal(0, 1, 0.0) != (WRONG,) for n in range(400)]
    assert 160 < sum(right) < 240
    in_turns = Scripts(profile, is_in_order=True)
    assert [in_turns.of(name).proposal(0, 1, 0.0) != (WRONG,) for name in ("x", "y", "z", "x")] == [
        True,
        False,
        True,
        True,
    ]


def test_without_outputs_every_request_has_the_same_script() -> None:
    scripts = Scripts(acceptance(1.0))
    assert scripts.of("a") is scripts.of("b")
    assert scripts.of("a").verdict(RNG, 7, (GUESS,)) == (1, GUESS)
