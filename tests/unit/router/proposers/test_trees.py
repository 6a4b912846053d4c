"""Trees in service: the output is the target's alone, and the control takes them where they bring more."""

from __future__ import annotations

from dataclasses import replace

from specray.fakes import (
    FakeTarget,
    NoisyGuesser,
    VirtualClock,
)
from specray.requests import OutputChunk
from tests.unit.control.harness import times
from tests.unit.router.harness import (
    MODEL,
    Pair,
    expected,
    fake_draft,
    in_virtual_time,
    request,
    serving,
)


@in_virtual_time
async def served(clock: VirtualClock, tree: str, **options: object) -> tuple[OutputChunk, Pair, float]:
    """One output of a pair whose draft's first guess is right in 6 of 10 places, and its second in all."""
    async with serving(clock, overlap="serial", tree=tree, **options) as pair:
        given = request("a", max_tokens=200)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        return output, pair, clock.monotonic()


def test_two_guesses_at_each_depth_are_never_wrong() -> None:
    output, _, _ = served("2x2x2", num_speculative_tokens=3)
    stats = output.stats
    assert stats is not None
    # All rounds accept all three but the last, which the output's length cuts.
    assert stats.acceptance_histogram[3] >= stats.num_spec_steps - 1
    assert stats.num_draft_tokens >= 14 * (stats.num_spec_steps - 1)
    chain, *_ = served("off", num_speculative_tokens=3)
    assert chain.stats is not None
    assert chain.stats.mean_acceptance_length < 0.7 * stats.mean_acceptance_length


def test_control_takes_trees_where_they_bring_more() -> None:
    output, pair, seconds = served("auto")
    chain, _, chain_seconds = served("off")
    assert output.stats is not None and chain.stats is not None
    assert output.stats.mean_acceptance_length > 1.1 * chain.stats.mean_acceptance_length
    assert seconds < 0.9 * chain_seconds
    assert pair.counted("specray_spec_decode_num_draft_tokens_total") > chain.stats.num_draft_tokens


async def test_control_keeps_chains_where_rows_are_dear(clock: VirtualClock) -> None:
    # A row takes a fifth of a step of one: a chain is worth its rows, three times as many are not.
    step_times = times((1, 0.020), (2, 0.024), (64, 0.272))
    info = replace(FakeTarget(MODEL).info, step_times=step_times)
    target = FakeTarget(MODEL, info=info, cost=lambda rows: int((0.016 + 0.004 * rows) * 1e9))
    draft = fake_draft(NoisyGuesser(MODEL, agreement=0.85))
    async with serving(clock, target=target, draft=draft, overlap="serial", tree="auto") as pair:
        stats = (await pair.router.complete(request("a", max_tokens=200))).stats
    assert stats is not None
    assert stats.num_spec_steps > 20
    assert stats.num_draft_tokens < 8 * stats.num_spec_steps
