"""Measures a running server over HTTP, with speculation on and off in one run.

The arms take turns (A B A B ...), so that changes of the machine's speed touch both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specray.bench.core.arm import Arm
from specray.bench.core.samples import (
    Samples,
    difference,
    histogram_quantile,
    hit_rate,
    mean_ms,
    parse_samples,
)
from specray.bench.core.turns import in_turns
from specray.bench.load.client import ServerClient
from specray.bench.load.prompts import Prompt
from specray.bench.load.run import MAX_KEPT_ERRORS, run_pass, send
from specray.bench.load.stats import ArmSummary, Pass, summarize
from specray.bench.plans import ServePlan
from specray.environment import api_key


@dataclass(frozen=True, slots=True)
class ServerStats:
    """The server's own figures of one pass; None: the server does not report it."""

    round_overhead_ms_p50: float | None
    verify_forward_ms_mean: float | None
    draft_forward_ms_mean: float | None
    num_rounds: float
    hit_rate: float | None
    """Share of looked-up verdicts whose continuation was ready."""


def server_stats(samples: Samples) -> ServerStats:
    """Computes the figures of a pass from the difference of two readings."""
    overhead_s = histogram_quantile(samples, "specray_round_overhead_seconds", 0.5)
    return ServerStats(
        round_overhead_ms_p50=None if overhead_s is None else 1e3 * overhead_s,
        verify_forward_ms_mean=mean_ms(samples, "specray_verify_forward_seconds"),
        draft_forward_ms_mean=mean_ms(samples, "specray_draft_forward_seconds"),
        num_rounds=samples.get(("specray_rounds_total", ()), 0.0),
        hit_rate=hit_rate(samples, ["hit"]),
    )


@dataclass(slots=True)
class ArmResult:
    arm: Arm
    passes: list[Pass] = field(default_factory=list)
    server: list[ServerStats] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def summary(self) -> ArmSummary:
        return summarize(self.arm.name, self.passes)

    @property
    def categories(self) -> dict[str, ArmSummary]:
        """Summaries by the prompts' category, in the order of their first requests; empty without any."""
        records = [record for one in self.passes for record in one.records]
        return {
            label: summarize(label, [Pass(own, sum(record.ended_s - record.started_s for record in own))])
            for label in dict.fromkeys(record.label for record in records if record.label)
            for own in [tuple(record for record in records if record.label == label)]
        }


@dataclass(frozen=True, slots=True)
class ServeResult:
    plan: ServePlan
    num_prompts: int
    model: str
    arms: tuple[ArmResult, ...]


def default_arms(num_speculative_tokens: Sequence[int] = ()) -> list[Arm]:
    """Returns the arms: speculation off, as the server chooses, and with each given K."""
    return [
        PLAIN,
        serve_arm("on", enabled=True),
        *(serve_arm(f"K={k}", enabled=True, num_speculative_tokens=k) for k in num_speculative_tokens),
    ]


def serve_arm(name: str, **speculation: Any) -> Arm:
    return Arm(name, {"speculation": speculation})


PLAIN = serve_arm("off", enabled=False)


async def measure(
    plan: ServePlan,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    on_progress: Callable[[str, int, int], None],
    *,
    run_id: str | None = None,
) -> ServeResult:
    """Runs the plan.

    Args:
        on_progress: called after each request with the arm's name, requests done and requests in all.
        run_id: name that no other run has; None: a random one.

    Raises:
        EngineLostError: there is no server.
    """
    results = {arm.name: ArmResult(arm) for arm in arms}
    num_done, num_all = 0, len(prompts) * len(arms) * plan.num_repeats
    name = uuid.uuid4().hex if run_id is None else run_id

    async def run_arm(client: ServerClient, result: ArmResult, label: str) -> None:
        def advance() -> None:
            nonlocal num_done
            num_done += 1
            on_progress(f"speculation {result.arm.name}", num_done, num_all)

        before = parse_samples(await client.metrics_text())
        one = await run_pass(
            client,
            [request_body(plan, result.arm, prompt.text, f"{name}, {label}") for prompt in prompts],
            concurrency=plan.concurrency,
            labels=[prompt.category for prompt in prompts],
            is_stream=plan.stream,
            on_done=advance,
        )
        result.passes.append(one.measured)
        result.errors.extend(one.errors[: MAX_KEPT_ERRORS - len(result.errors)])
        result.server.append(server_stats(difference(before, parse_samples(await client.metrics_text()))))

    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
        model = await client.model()
        for arm in arms:
            for prompt in prompts[: plan.num_warmup]:
                body = request_body(plan, arm, prompt.text, f"{name}, {arm.name}, warm-up")
                await send(client, body, is_stream=plan.stream)
        for number, _, arm in in_turns(arms, plan.num_repeats):
            await run_arm(client, results[arm.name], f"{arm.name}, pass {number + 1}")
    return ServeResult(plan, len(prompts), model, tuple(results.values()))


def request_body(plan: ServePlan, arm: Arm, prompt: str, label: str) -> dict[str, Any]:
    """Makes the body for one prompt; with fresh prompts, ``label`` names a part of the prefix cache."""
    return {
        **({"messages": [{"role": "user", "content": prompt}]} if plan.chat else {"prompt": prompt}),
        **({"cache_salt": label} if plan.fresh_prompts else {}),
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "ignore_eos": plan.ignore_eos,
        "speculation": arm.changes["speculation"],
        "return_speculation_metrics": True,
    }
