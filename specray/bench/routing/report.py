"""Measures the arms of routing in turns, and shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from specray.bench.core.turns import in_turns
from specray.bench.plans import RoutingPlan
from specray.bench.routing.arms import ARMS, Result, routing_config, run_real, run_simulated
from specray.bench.routing.conversations import ConversationLoad
from specray.planning.profile import load_profile

if TYPE_CHECKING:
    from rich.table import Table

_ENGINE: dict[str, Any] = {"max_num_seqs": 16, "num_threads": 1, "profile_s": 0.5}
"""What targets are: several share a machine."""
_VOCAB_SIZE: Final = 1000
"""Tokens that prompts are drawn from; every model has them."""


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """All runs of one arm, real or simulated."""

    kind: str
    arm: str
    found_share: float
    """Found prompt tokens over those that one cache with everything would have found; the median."""
    cached_share: float
    """Found prompt tokens over all of them; the median."""
    mean_ttft_ms: float
    """Median of the runs' mean milliseconds to the first token."""
    tokens_per_s: float
    imbalance: float
    """Most requests of a Router over their mean; the median."""


def measure_routing(plan: RoutingPlan, progress: Callable[[str], None]) -> list[ArmSummary]:
    """Runs all arms in turns, and in virtual time where there is a profile.

    Raises:
        ConfigError: the profile is wrong.
        EngineLostError: a service did not start, or a request failed.
    """
    profile = None if plan.profile is None else load_profile(plan.profile)
    results: dict[tuple[str, str], list[Result]] = {}
    for number, _, arm in in_turns(ARMS, plan.num_repeats):
        config = routing_config(arm, num_routers=plan.num_routers, engine=_ENGINE)
        load = _load(plan, vocab_size=_VOCAB_SIZE)
        progress(f"{arm}, turn {number + 1}")
        results.setdefault(("real", arm), []).append(
            asyncio.run(run_real(config, load, seed=plan.seed + number))
        )
        if profile is not None:
            simulated = run_simulated(
                config, profile, load, num_routers=plan.num_routers, seed=plan.seed + number
            )
            results.setdefault(("simulated", arm), []).append(simulated)
    return [_summary(kind, arm, runs) for (kind, arm), runs in sorted(results.items())]


def routing_table(arms: Sequence[ArmSummary]) -> Table:
    """A table with one row per arm."""
    from rich.table import Table

    table = Table("run", "routing", "found of findable", "cached", "mean TTFT ms", "tokens/s", "max/mean")
    for each in arms:
        table.add_row(
            each.kind,
            each.arm,
            f"{each.found_share:.2f}",
            f"{each.cached_share:.2f}",
            f"{each.mean_ttft_ms:.0f}",
            f"{each.tokens_per_s:.1f}",
            f"{each.imbalance:.2f}",
        )
    return table


def routing_json(arms: Sequence[ArmSummary]) -> list[dict[str, Any]]:
    return [asdict(each) for each in arms]


def _load(plan: RoutingPlan, *, vocab_size: int) -> ConversationLoad:
    return ConversationLoad(
        plan.num_conversations,
        plan.concurrency,
        plan.num_turns,
        plan.num_tenants,
        plan.system_tokens,
        plan.user_tokens,
        plan.output_tokens,
        vocab_size,
    )


def _summary(kind: str, arm: str, runs: Sequence[Result]) -> ArmSummary:
    return ArmSummary(
        kind,
        arm,
        median(run.outcome.found_share for run in runs),
        median(run.outcome.cached_share for run in runs),
        median(run.outcome.mean_ttft_ms for run in runs),
        median(run.tokens_per_s for run in runs),
        median(run.imbalance for run in runs),
    )
