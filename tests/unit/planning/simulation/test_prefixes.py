"""Prefixes in a simulated fleet: what is found costs nothing, and the routing says where it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.bench.routing.arms import run_simulated
from specray.bench.routing.conversations import ConversationLoad
from specray.config import parse_config
from specray.planning.load import ClosedLoad, FixedLength, OpenLoad, SharedPrefixes
from specray.planning.profile import Profile
from specray.planning.simulation.results import Slo, TimeWindow
from specray.planning.simulation.runs import simulate, simulate_closed
from tests.unit.planning.parts import plain_kit, target

LOAD = ConversationLoad(
    num_conversations=16,
    concurrency=4,
    num_turns=6,
    num_tenants=4,
    system_tokens=64,
    user_tokens=16,
    output_tokens=16,
    vocab_size=1000,
)


def test_a_shared_prefix_is_computed_once_and_found_then() -> None:
    prefixes = SharedPrefixes(1, 64)
    load = ClosedLoad(1, 5, FixedLength(100), FixedLength(1), prefixes=prefixes)
    run = simulate_closed(plain_kit(), load, num_drafts=0)
    # 64 of 100 tokens, of all but the first request.
    assert run.found_share == pytest.approx(4 * 64 / 500)
    alone = simulate_closed(plain_kit(), replace(load, prefixes=None), num_drafts=0)
    assert alone.found_share == 0.0
    assert run.window_s < alone.window_s


def test_with_recurrent_layers_a_prefix_is_found_up_to_a_snapshot() -> None:
    load = ClosedLoad(1, 5, FixedLength(200), FixedLength(1), prefixes=SharedPrefixes(1, 112))
    for num_snapshots, found in ((0, 112), (8, 64)):
        run = simulate_closed(plain_kit(num_snapshots=num_snapshots), load, num_drafts=0)
        assert run.found_share == pytest.approx(4 * found / 1000)


def test_prompts_that_share_nothing_find_nothing() -> None:
    prefixes = SharedPrefixes(1, 64, share=1e-9)
    load = ClosedLoad(2, 20, FixedLength(100), FixedLength(1), prefixes=prefixes)
    assert simulate_closed(plain_kit(), load, num_groups=2, num_drafts=0).found_share == 0.0


@pytest.mark.parametrize(("routing", "least", "most"), [("prefix", 0.9, 1.0), ("load", 0.3, 0.8)])
def test_conversations_find_their_prefix_where_it_is_routed_to(
    routing: str, least: float, most: float
) -> None:
    config = parse_config({"router": {"routing": routing}})
    prefill = [{"num_tokens": 16, "seconds": 0.026}, {"num_tokens": 1024, "seconds": 1.034}]
    profile = Profile(target=target(max_model_len=1024, prefill=prefill))
    result = run_simulated(config, profile, LOAD, num_routers=4)
    assert len(result.outcome.turns) == 16 * 6
    assert least <= result.outcome.found_share <= most
    again = run_simulated(config, profile, LOAD, num_routers=4)
    assert again == result


def test_one_prefix_for_all_does_not_pile_up() -> None:
    load = OpenLoad(40.0, FixedLength(80), FixedLength(8), prefixes=SharedPrefixes(1, 64))
    kits = [
        replace(plain_kit(), router_config=parse_config({"router": {"routing": routing}}).router)
        for routing in ("prefix", "load")
    ]
    window = TimeWindow(2.0, 10.0)
    prefix, by_load = (
        simulate(kit, load, window, num_groups=4, num_drafts=0, slo=Slo(), seed=2) for kit in kits
    )
    assert prefix.tokens_per_s >= 0.97 * by_load.tokens_per_s
    assert prefix.ttft_ms is not None and by_load.ttft_ms is not None
    assert prefix.ttft_ms.p50 <= 1.1 * by_load.ttft_ms.p50
    assert prefix.ttft_ms.p95 <= 1.05 * by_load.ttft_ms.p95
