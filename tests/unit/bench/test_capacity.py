"""Tests of a whole profile measurement, with worker processes around fake engines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from specray.bench.capacity import SweepPlan, measure_profile
from specray.bench.plan_check import LoadRunner, compare
from specray.config import parse_config
from specray.planning.simulation.fleet import Kit
from tests.unit.bench.capacity_worker import DRAFT_NS, TARGET_NS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="starts worker processes"),
]

WORKER = (sys.executable, str(Path(__file__).with_name("capacity_worker.py")))
PLAN = SweepPlan(
    temperatures=(0.0,), num_sequences=(1, 2), ks=(0, 2), has_overlap=True, num_acceptance_tokens=12
)


def test_measured_profile_has_every_part_and_predicts() -> None:
    config = parse_config({})
    prompts = ["def f(n):\n", "class A:\n"]
    steps: list[str] = []
    runner = LoadRunner(config, prompts, concurrency=(1, 2), max_tokens=8, temperature=0.0)
    profile = asyncio.run(
        measure_profile(
            config,
            prompts,
            PLAN,
            name="toy",
            in_turn=runner.run_pass,
            progress=steps.append,
            worker_command=WORKER,
        )
    )
    assert (profile.name, profile.target.model, profile.target.max_num_seqs) == ("toy", "toy-target", 64)
    # Workers report step times that do not pass in reality, so transport is nothing.
    assert profile.draft is not None
    for point in profile.target.verify:
        assert point.seconds == pytest.approx(1e-9 * TARGET_NS * point.num_rows)
    for proposed in profile.draft.propose:
        assert proposed.seconds == pytest.approx(1e-9 * DRAFT_NS * proposed.num_tokens)
    assert [point.num_tokens for point in profile.target.prefill][-1] > 400
    for prompt in profile.target.prefill:
        assert prompt.seconds == pytest.approx(1e-9 * TARGET_NS * prompt.num_tokens, rel=0.1)
    assert profile.router.verify_after_proposal.of(1) > 0
    # The fake draft is always right.
    (at_zero,) = profile.acceptance
    assert set(at_zero.by_position) == {1.0}
    assert {hit.rate for hit in at_zero.hit_rates} == {1.0}
    assert steps[0] == "starting the pair"

    # The loads were served once after each pass.
    assert {count: len(passes) for count, passes in runner.measured.passes.items()} == {1: 3, 2: 3}
    kit = Kit(profile.target, profile.draft, at_zero, profile.router)
    rows = compare(kit, runner.measured)
    assert [(row.concurrency, row.num_requests) for row in rows] == [(1, 3), (2, 6)]
    assert all(row.predicted_tokens_per_s > 0 and row.measured_tokens_per_s > 0 for row in rows)
    assert rows[0].error == rows[0].predicted_tokens_per_s / rows[0].measured_tokens_per_s - 1
