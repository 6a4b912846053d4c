"""Tests of the search: the smallest fleet that holds a load, and the cheapest."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from specray.config import RouterConfig, SpeculationConfig
from specray.errors import ConfigError
from specray.planning.hardware import Offer, make_offers, parse_costs
from specray.planning.load import FixedLength, OpenLoad
from specray.planning.profile import Profile
from specray.planning.report import plan_json, recommendation
from specray.planning.search import Demand, cell_of, make_plan, num_drafts_for
from specray.planning.simulation.results import RunResult, Slo
from tests.unit.planning.parts import LIMITS, PREFILL_S, VERIFY_S, acceptance, draft, target

pytestmark = pytest.mark.slow

SERIAL_3 = SpeculationConfig.model_validate({"num_speculative_tokens": 3, "overlap": "serial"})


def offers(*profiles: Profile, costs: dict[str, float] | None = None) -> list[Offer]:
    return make_offers(
        profiles,
        costs or {},
        temperature=0.0,
        speculation=SERIAL_3,
        router_config=RouterConfig.model_validate({}),
    )


def demand(rate_per_s: float, *, output: int = 1, **changes: Any) -> Demand:
    load = OpenLoad(rate_per_s, FixedLength(10), FixedLength(output), is_poisson=False)
    return replace(Demand(load, Slo(), num_requests=60), **changes)


def one_by_one() -> Profile:
    """Makes a target that serves one request at a time: one output token in PREFILL_S."""
    return Profile(target=target(max_num_seqs=1))


def test_as_few_groups_as_the_load_divided_by_the_capacity() -> None:
    # 95 % of 50 requests/s is what a group may be given.
    for rate, groups in ((40, 1), (47, 1), (48, 2), (430, 10)):
        plan = make_plan(offers(one_by_one()), [Fraction(0)], demand(rate))
        assert (plan.best.num_groups, plan.best.is_enough) == (groups, True), rate
        assert plan.best.capacity_tokens_per_s == pytest.approx(1 / PREFILL_S)


def test_an_slo_takes_more_groups_than_the_capacity_alone() -> None:
    # Steps take longer the more rows they have, so that an ITL means few sessions at a time.
    # Few places: the search lets a saturated fleet's requests end, and those of 64 places take long.
    slow = target(
        max_num_seqs=12, verify=[{"num_rows": 1, "seconds": 0.01}, {"num_rows": 11, "seconds": 0.11}]
    )
    profile = Profile(target=slow)
    load = demand(14, output=20)
    strict = replace(load, slo=Slo(itl_ms=12))
    fast = make_plan(offers(profile), [Fraction(0)], load).best
    strict_best = make_plan(offers(profile), [Fraction(0)], strict).best
    assert strict_best.is_enough
    assert strict_best.num_groups > fast.num_groups
    assert strict_best.run.met_share >= 0.95


def test_a_load_that_no_fleet_holds_is_said_with_the_best_found() -> None:
    plan = make_plan(offers(one_by_one()), [Fraction(0)], demand(1000, max_groups=4))
    assert not plan.best.is_enough
    assert plan.best.num_groups == 4
    text = recommendation(plan, has_prices=False)
    assert text.startswith("The load cannot be held with at most 4 target groups: the best found, 4 target")
    assert plan_json(plan)["is_enough"] is False


def test_an_impossible_slo_is_said_too() -> None:
    impossible = demand(5, slo=Slo(ttft_ms=1), max_groups=3)
    plan = make_plan(offers(one_by_one()), [Fraction(0)], impossible)
    assert not plan.best.is_enough
    assert "(95 % of them with TTFT <= 1 ms)" in recommendation(plan, has_prices=False)


def pair(**changes: Any) -> Profile:
    return Profile(target=target(max_num_seqs=1), draft=draft(), acceptance=(acceptance(0.9),), **changes)


def test_drafts_pay_where_they_are_cheap_and_not_where_they_are_dear() -> None:
    # Plain: 20 ms + 40 tokens of 10 ms; with a draft about 3.4 tokens in 14 ms.
    load = demand(6, output=41, num_requests=30)
    ratios = [Fraction(0), Fraction(1)]
    cheap = make_plan(offers(pair(), costs={"big": 10.0, "little": 1.0}), ratios, load)
    dear = make_plan(offers(pair(), costs={"big": 10.0, "little": 100.0}), ratios, load)
    assert cheap.best.drafts_per_group == 1 and cheap.best.num_groups < dear.best.num_groups
    assert dear.best.num_drafts == 0
    assert cheap.best.cost == 10.0 * cheap.best.num_groups + 1.0 * cheap.best.num_drafts
    assert "without drafts it takes" in recommendation(cheap, has_prices=True)


def test_the_cheaper_hardware_is_chosen() -> None:
    twice = target(
        hardware="huge",
        max_num_seqs=1,
        prefill=[{"num_tokens": 1, "seconds": PREFILL_S / 2}],
        verify=[{"num_rows": 1, "seconds": VERIFY_S / 2}],
    )
    both = one_by_one(), Profile(target=twice)
    huge = make_plan(offers(*both, costs={"big": 2.0, "huge": 3.0}), [Fraction(0)], demand(90)).best
    big = make_plan(offers(*both, costs={"big": 2.0, "huge": 5.0}), [Fraction(0)], demand(90)).best
    assert (huge.offer.target_hardware, huge.num_groups) == ("huge", 1)
    assert (big.offer.target_hardware, big.num_groups) == ("big", 2)


def test_targets_of_one_profile_are_tried_with_drafts_of_another() -> None:
    other = draft(hardware="tiny", num_devices=2)
    made = offers(
        pair(),
        Profile(target=target(hardware="huge", num_devices=4), draft=other, acceptance=(acceptance(0.5),)),
        costs={"big": 1.0, "huge": 2.0, "little": 0.5, "tiny": 0.25},
    )
    assert [(one.target_hardware, one.draft_hardware, one.target_price, one.draft_price) for one in made] == [
        ("big", "little", 1.0, 0.5),
        ("big", "tiny", 1.0, 0.5),
        ("huge", "tiny", 8.0, 0.5),
        ("huge", "little", 8.0, 0.5),
    ]


def test_drafts_of_another_model_are_not_combined() -> None:
    other = Profile(target=target(hardware="huge"), draft=draft(model="other"), acceptance=(acceptance(0.5),))
    assert len(offers(pair(), other)) == 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["big"], "--cost is 'big'; allowed: NAME=USD_PER_HOUR"),
        (["big=-1"], "--cost is 'big=-1'"),
        (["big=x"], "--cost is 'big=x'"),
        (["H100=3"], "--cost H100: no profile has such hardware; there is: big; little"),
        (["big=3"], "--cost: hardware 'little' needs one price; there is no --cost for it"),
        (["bi=3", "ig=4", "little=1"], "hardware 'big' needs one price; it is named by bi and ig"),
    ],
)
def test_wrong_prices_are_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        offers(pair(), costs=parse_costs(texts))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("num_groups", "ratio", "cell"),
    [(1, "1/4", (1, 1)), (8, "1/4", (8, 2)), (7, "1/2", (7, 4)), (200, "1/4", (8, 2)), (200, "1/3", (6, 2))],
)
def test_a_large_fleet_is_simulated_by_a_cell_of_the_same_ratio(
    num_groups: int, ratio: str, cell: tuple[int, int]
) -> None:
    assert cell_of(num_groups, Fraction(ratio)) == cell


def test_a_fleet_with_drafts_has_at_least_one() -> None:
    assert num_drafts_for(1, Fraction(1, 4)) == 1
    assert num_drafts_for(9, Fraction(1, 4)) == 3
    assert num_drafts_for(9, Fraction(0)) == 0


def test_what_is_recommended_is_simulated_whole() -> None:
    plan = make_plan(offers(one_by_one()), [Fraction(0)], demand(700))
    assert plan.best.num_groups > 8
    assert isinstance(plan.whole, RunResult)
    assert plan.whole.num_groups == plan.best.num_groups
    assert LIMITS["max_num_seqs"] == 64
