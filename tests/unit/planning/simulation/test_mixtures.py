"""What the control chooses for mixtures, in virtual time: against every fixed K and plain decoding."""

from __future__ import annotations

import random

import pytest

from specray.config import SpeculationConfig
from specray.control.experts import ExpertUse
from specray.planning.load import ClosedLoad, FixedLength
from specray.planning.profile import LENGTH_DIGITS, AcceptanceProfile, MeasuredOutput
from specray.planning.simulation.fleet import Kit
from specray.planning.simulation.runs import simulate_closed
from specray.planning.simulation.times import SimulatedTargetTimes, StepSize
from tests.unit.planning.parts import VERIFY_S, draft, output, replayed, target

NUM_TOKENS = 256
BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_S = 0.001


def drafted(rng: random.Random, chances: tuple[float, ...]) -> MeasuredOutput:
    """An output of which the draft has each token with one of the chances, and knows which."""
    sure = [rng.choice(chances) for _ in range(NUM_TOKENS + 32)]

    def length(place: int, bound: float) -> str:
        chance, found = sure[place], 1
        while found < 32 and (chance := chance * sure[place + found]) >= bound:
            found += 1
        return LENGTH_DIGITS[found]

    lengths = [
        {"min_acceptance": bound, "by_position": "".join(length(place, bound) for place in range(NUM_TOKENS))}
        for bound in BOUNDS
    ]
    agreements = "".join("01"[rng.random() < chance] for chance in sure[:NUM_TOKENS])
    return output(agreements, lengths=lengths)


def outputs(*chances: float, seed: int = 1) -> AcceptanceProfile:
    rng = random.Random(seed)
    return replayed(*(drafted(rng, chances) for _ in range(16)))


EASY, HARD = outputs(0.97, 0.97, 0.9, 0.5), outputs(0.6, 0.4)


def mixture(share: float, num_speculative_tokens: int | str, acceptance: AcceptanceProfile) -> Kit:
    """48 layers of 128 experts, eight of them chosen, of which neighbours share some; a row takes 10 ms."""
    profile = target(
        experts={"num_experts": 6144, "num_chosen": 384, "share": share, "rows_exponent": 0.8},
        verify=[{"num_rows": 1, "seconds": VERIFY_S}, {"num_rows": 64, "seconds": 1.25 * VERIFY_S}],
        step_times=[{"num_rows": 1, "seconds": VERIFY_S, "num_experts": 384}],
        step_spread=(0.93, 0.97, 1.0, 1.03, 1.07),
    )
    drafting = draft(
        propose=[
            {"num_sequences": 1, "num_tokens": tokens, "seconds": DRAFT_S * tokens} for tokens in (1, 16)
        ],
        step_times=[{"num_rows": 1, "seconds": DRAFT_S}],
    )
    settings = {
        "num_speculative_tokens": num_speculative_tokens,
        "overlap": "serial",
        "fallback": "none",
    }
    return Kit(profile, drafting, acceptance, speculation=SpeculationConfig.model_validate(settings))


def tokens_per_s(
    share: float, k: int | str, *, concurrency: int, acceptance: AcceptanceProfile = EASY, num: int = 24
) -> float:
    load = ClosedLoad(concurrency, num, FixedLength(16), FixedLength(NUM_TOKENS))
    return simulate_closed(mixture(share, k, acceptance), load, seed=1).tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "concurrency"), [(0.3, 1), (0.3, 8), (0.55, 1), (0.55, 8), (0.9, 1), (0.9, 8)], ids=str
)
def test_what_is_chosen_is_within_four_percent_of_the_best_k(share: float, concurrency: int) -> None:
    fixed = [tokens_per_s(share, k, concurrency=concurrency) for k in (0, 2, 4, 6)]
    chosen = tokens_per_s(share, "auto", concurrency=concurrency)
    assert chosen >= 0.96 * max(fixed) and chosen >= 0.98 * fixed[0]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "concurrency"), [(0.55, 1), (0.9, 1), (0.9, 8)], ids=str)
def test_a_draft_that_does_not_pay_for_its_experts_costs_two_percent_at_most(
    share: float, concurrency: int
) -> None:
    plain, chosen = (
        tokens_per_s(share, k, concurrency=concurrency, acceptance=HARD, num=32) for k in (0, "auto")
    )
    assert chosen >= 0.98 * plain


def test_a_simulated_step_hits_and_takes_what_rows_and_sequences_say() -> None:
    kit = mixture(0.5, 4, EASY)
    assert kit.target.experts is not None
    use: ExpertUse = kit.target.experts.use()
    times = SimulatedTargetTimes(kit.target)
    steps = []
    for num_sequences, num_drafts in ((1, 7), (8, 0)):
        step = StepSize()
        for _ in range(num_sequences):
            step.add(100, 1, num_drafts)
        steps.append(step)
    hits = [times.num_experts(step) for step in steps]
    assert hits == [round(use.expected(8, 1)), round(use.expected(8, 8))]
    alike, apart = (times.seconds(step) for step in steps)
    assert apart / alike == pytest.approx(use.expected_factor(8, 8) / use.expected_factor(8, 1))
    prompt = StepSize()
    prompt.add(0, 100, 0)
    assert times.num_experts(prompt) is None
