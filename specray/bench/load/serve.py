"""Measures a running server over HTTP, with speculation on and off in one run.

The arms take turns (A B A B ...), so that changes of the machine's speed touch both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specray.bench.core.samples import (
    Samples,
    difference,
    histogram_quantile,
    hit_rate,
    mean_ms,
    parse_samples,
)
from specray.bench.load.client import ServerClient
from specray.bench.load.run import MAX_KEPT_ERRORS, run_pass, send
from specray.bench.load.stats import ArmSummary, Pass, summarize
from specray.environment import api_key


@dataclass(frozen=True, slots=True)
class ServeArm:
    """One way to serve the same prompts."""

    name: str
    speculation: dict[str, Any]
    """``speculation`` object of the request."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The arms, prompts and load of a run."""

    url: str
    prompts: Sequence[str]
    arms: Sequence[ServeArm]
    num_repeats: int = 2
    concurrency: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    """True if all outputs have max_tokens tokens, so that the arms do equal work."""
    is_stream: bool = True
    """False: one response per request, and no time to the first token."""
    num_warmup: int = 2
    """Uncounted requests per arm before the first pass."""
    has_fresh_prompts: bool = True
    """True if each pass has a part of the prefix cache of its own: sharing would favour the later arms."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name that no other run has."""
    is_chat: bool = False
    """True if each prompt is a user's message behind the model's chat template."""
    categories: Sequence[str] = ()
    """Names of the prompts' kinds, one for each; empty: none."""
    timeout_s: float = 600.0


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
    """Results of one arm's passes."""

    arm: ServeArm
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
    """Results of a whole run."""

    plan: ServePlan
    model: str
    arms: tuple[ArmResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns everything but the prompts, for ``--json``."""
        plan = {
            key: value
            for key, value in asdict(self.plan).items()
            if key not in ("prompts", "arms", "categories", "run_id")
        }
        return {
            "model": self.model,
            "plan": {**plan, "num_prompts": len(self.plan.prompts)},
            "arms": [
                {
                    **asdict(result.summary),
                    "speculation": result.arm.speculation,
                    "server": [asdict(stats) for stats in result.server],
                    "errors": result.errors,
                    "categories": {name: asdict(one) for name, one in result.categories.items()},
                }
                for result in self.arms
            ],
        }


def default_arms(num_speculative_tokens: Sequence[int] = ()) -> list[ServeArm]:
    """Returns the arms: speculation off, as the server chooses, and with each given K."""
    return [
        ServeArm("off", {"enabled": False}),
        ServeArm("on", {"enabled": True}),
        *(ServeArm(f"K={k}", {"enabled": True, "num_speculative_tokens": k}) for k in num_speculative_tokens),
    ]


async def measure(plan: ServePlan, on_progress: Callable[[str, int, int], None]) -> ServeResult:
    """Runs the plan.

    Args:
        on_progress: called after each request with the arm's name, requests done and requests in all.

    Raises:
        EngineLostError: there is no server.
    """
    results = tuple(ArmResult(arm) for arm in plan.arms)
    num_done, num_all = 0, len(plan.prompts) * len(results) * plan.num_repeats
    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
        model = await client.model()
        for arm in plan.arms:
            for prompt in plan.prompts[: plan.num_warmup]:
                await send(client, request_body(plan, arm, prompt, "warm-up"), is_stream=plan.is_stream)
        for repeat in range(plan.num_repeats):
            for result in results:

                def advance(name: str = result.arm.name) -> None:
                    nonlocal num_done
                    num_done += 1
                    on_progress(name, num_done, num_all)

                await _run_pass(client, plan, result, f"pass {repeat + 1}", advance)
    return ServeResult(plan, model, results)


async def _run_pass(
    client: ServerClient, plan: ServePlan, result: ArmResult, label: str, advance: Callable[[], None]
) -> None:
    before = parse_samples(await client.metrics_text())
    one = await run_pass(
        client,
        [request_body(plan, result.arm, prompt, label) for prompt in plan.prompts],
        concurrency=plan.concurrency,
        labels=plan.categories,
        is_stream=plan.is_stream,
        on_done=advance,
    )
    result.passes.append(one.measured)
    result.errors.extend(one.errors[: MAX_KEPT_ERRORS - len(result.errors)])
    result.server.append(server_stats(difference(before, parse_samples(await client.metrics_text()))))


def request_body(plan: ServePlan, arm: ServeArm, prompt: str, label: str) -> dict[str, Any]:
    """Makes the body for one prompt; with fresh prompts, ``label`` tells the passes of an arm apart."""
    asked: dict[str, Any] = {"prompt": prompt}
    if plan.is_chat:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    if plan.has_fresh_prompts:
        asked["cache_salt"] = f"{plan.run_id}, {arm.name}, {label}"
    return {
        **asked,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "ignore_eos": plan.ignore_eos,
        "speculation": arm.speculation,
        "return_speculation_metrics": True,
    }
