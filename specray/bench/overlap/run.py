"""Compares overlap modes and K: one pair of workers without Ray, a router per arm, in turns.

The engines may have cores of their own, so that on one machine they share nothing but the memory. Every arm
produces the same tokens, in float32; only the time differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specray.bench.load.stats import speedup_in_turns
from specray.bench.overlap.link import linked_pair
from specray.config import Config, parse_config
from specray.requests import GenerateRequest
from specray.router import Router
from specray.serving.local.pair import LocalPair
from specray.telemetry.metrics import RouterMetrics
from specray.tokenization import load_tokenizer
from specray.types import Overlap, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from specray.bench.overlap.link import CountedLink, Hosts

HITS = ("hit", "late_hit")
SIMPLE = "simple"
"""K of an arm under ``speculation.control: simple``."""
_STRIDE = 37
"""Stride of output lengths, so that neighbours are not alike."""
MISSES = ("miss_token", "miss_count", "late_miss")


@dataclass(frozen=True, slots=True)
class OverlapArm:
    """One mode: K, and how the engines take turns. K = 0 is plain decoding; simple: auto, by that control."""

    num_speculative_tokens: int | str
    overlap: Overlap | str
    tree: str | None = None
    """Trees as ``speculation.tree`` has them; None: as configured."""

    @property
    def name(self) -> str:
        if self.num_speculative_tokens == 0:
            return "off"
        tree = "" if self.tree is None else f" tree={self.tree}"
        return f"{self.overlap} K={self.num_speculative_tokens}{tree}"


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """Results of one arm at one temperature, over all its passes. Times are means, in milliseconds."""

    arm: str
    temperature: float
    tokens_per_s: float
    acceptance_rate: float | None
    tokens_per_round: float
    hit_rate: float | None
    verify_ms: float
    draft_ms: float | None
    idle_ms: float
    """Milliseconds for which the target waits between a verdict and the next Verify."""
    concurrency: int = 1
    """Requests at a time."""
    delay_ms: float | None = None
    """Delay added between router and draft, each way, in milliseconds."""
    bytes_per_round: float | None = None
    """Bytes between router and draft per round, both ways: without TCP headers for a relay, whole frames for
    a cable."""
    speedup: tuple[float, float] | None = None
    """Speedup over plain decoding, pass by pass, and its standard error; None: no plain arm, or too few
    passes."""
    plans: dict[str, float] = field(default_factory=dict)
    """Share of the rounds by plan: overlap, K and reason."""

    def is_like(self, other: OverlapResult) -> bool:
        """True if the two differ in nothing but the arm."""
        mine, others = ((result.concurrency, result.temperature, result.delay_ms) for result in (self, other))
        return mine == others


@dataclass(slots=True)
class _Running:
    arm: OverlapArm
    router: Router
    num_tokens: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    num_rounds: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each pass."""

    def reset(self) -> None:
        """Forgets the warm-up."""
        self.num_tokens, self.seconds, self.num_bytes = 0, 0.0, 0
        self.rates.clear()
        self.num_rounds = self.router.metrics.value("specray_rounds_total")


def with_arm(config: Config, arm: OverlapArm) -> Config:
    """Returns the configuration of an arm's router."""
    values = config.model_dump(mode="json")
    is_simple = arm.num_speculative_tokens == SIMPLE
    if is_simple:
        values["speculation"]["control"] = SIMPLE
    values["speculation"]["num_speculative_tokens"] = "auto" if is_simple else arm.num_speculative_tokens
    values["speculation"]["overlap"] = str(arm.overlap)
    if arm.tree is not None:
        values["speculation"]["tree"] = arm.tree
    return parse_config(values)


async def measure_overlap(
    config: Config,
    arms: Sequence[OverlapArm],
    prompts: Sequence[str],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    num_prompts: int = 1,
    num_repeats: int = 2,
    delay_ms: float | None = None,
    hosts: Hosts | None = None,
    concurrencies: Sequence[int] = (1,),
    progress: Callable[[str], None] = lambda text: None,
) -> list[OverlapResult]:
    """Serves the prompts with each arm in turn, ``num_repeats`` times.

    Args:
        config: configuration of the pair, its cores and threads.
        arms: the arms to compare.
        prompts: prompts, of which each pass takes the first ones.
        temperatures: sampling temperatures; each is measured by itself.
        max_tokens: output tokens per prompt.
        num_prompts: prompts per pass; at least two for each request at a time are taken.
        num_repeats: passes per arm.
        delay_ms: delay between router and draft, each way; None: a direct connection.
        hosts: hosts of router and draft whose cable delays; None: a relay does.
        concurrencies: requests at a time; each is measured by itself.
        progress: called with the name of the next part.

    Raises:
        ConfigError: a model or a setting is wrong.
        EngineLostError: a worker did not start or was lost.
    """
    tokenizer = load_tokenizer(config.target.model)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    async with linked_pair(config, delay_ms=delay_ms, hosts=hosts) as (pair, link):
        results: list[OverlapResult] = []
        for concurrency in concurrencies:
            results += await measure_arms(
                config,
                pair,
                arms,
                encoded[: num_prompts_of(num_prompts, concurrency)],
                temperatures=temperatures,
                max_tokens=max_tokens,
                num_repeats=num_repeats,
                link=link,
                delay_ms=delay_ms,
                concurrency=concurrency,
                progress=progress,
            )
        return results


def num_prompts_of(num_prompts: int, concurrency: int) -> int:
    """Returns the prompts per pass: at least two per place, or mainly its end would be measured."""
    return max(num_prompts, 2 * concurrency) if concurrency > 1 else num_prompts


async def measure_arms(
    config: Config,
    pair: LocalPair,
    arms: Sequence[OverlapArm],
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    num_repeats: int,
    link: CountedLink | None = None,
    delay_ms: float | None = None,
    concurrency: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    on_output: Callable[
        [OverlapArm, float, int, Sequence[int]], None
    ] = lambda arm, temperature, index, output: None,
) -> list[OverlapResult]:
    """Serves the prompts with a pair that runs already; see :func:`measure_overlap`.

    Args:
        prompts: prompts as token ids.
        link: connection of router and draft.
        on_output: called for each output after the warm-up: arm, temperature, prompt's index, token ids.
    """
    results: list[OverlapResult] = []
    for temperature in temperatures:
        async with AsyncExitStack() as stack:
            running = [await _start(config, arm, pair, stack) for arm in arms]
            for repeat in range(-1, num_repeats):
                for one in running:
                    at = f"{concurrency} at a time, temperature {temperature:g}"
                    progress(f"{at}, {one.arm.name}, pass {max(repeat, 0) + 1}")
                    # The first pass warms up caches and threads, and lets the controller learn.
                    batch = prompts[:concurrency] if repeat < 0 else prompts
                    before = 0 if link is None else link.num_bytes
                    lengths = lengths_of(len(batch), max_tokens, concurrency)
                    requests = _requests(one.arm, batch, temperature, lengths, repeat)
                    outputs = await _run_pass(one, requests, concurrency)
                    one.num_bytes += 0 if link is None else link.num_bytes - before
                    if repeat < 0:
                        one.reset()
                        continue
                    for index, output in enumerate(outputs):
                        on_output(one.arm, temperature, index, output)
            plain = next((one.rates for one in running if one.arm.num_speculative_tokens == 0), None)
            results.extend(
                replace(_result(one, temperature, delay_ms, plain), concurrency=concurrency)
                for one in running
            )
    return results


async def _start(config: Config, arm: OverlapArm, pair: LocalPair, stack: AsyncExitStack) -> _Running:
    router = pair.router(with_arm(config, arm))
    await router.start()
    stack.push_async_callback(router.stop)
    return _Running(arm, router)


def lengths_of(num_prompts: int, max_tokens: int, concurrency: int) -> list[int]:
    """Returns the output tokens of each prompt: with several at a time, 0.5 to 1.5 times ``max_tokens``.

    With equal lengths and no speculation all outputs would end in the same step, and the next prompts would
    be prefilled together while nobody waits: not as in service, and not as with speculation.
    """
    if concurrency == 1:
        return [max_tokens] * num_prompts
    spread = max_tokens // 2
    return [max(1, max_tokens - spread + index * _STRIDE % (2 * spread + 1)) for index in range(num_prompts)]


def _requests(
    arm: OverlapArm, prompts: Sequence[Sequence[int]], temperature: float, lengths: Sequence[int], repeat: int
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{arm.name}-{temperature:g}-{repeat}-{index}",
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(temperature=temperature, seed=index, num_prompt_tokens=len(token_ids)),
            max_tokens=lengths[index],
        )
        for index, token_ids in enumerate(prompts)
    ]


async def _run_pass(
    one: _Running, requests: Sequence[GenerateRequest], concurrency: int
) -> list[Sequence[int]]:
    places = asyncio.Semaphore(concurrency)

    async def complete(request: GenerateRequest) -> Sequence[int]:
        async with places:
            return (await one.router.complete(request)).token_ids

    started = time.perf_counter()
    outputs = await asyncio.gather(*map(complete, requests))
    seconds = time.perf_counter() - started
    num_tokens = sum(map(len, outputs))
    one.seconds += seconds
    one.num_tokens += num_tokens
    one.rates.append(num_tokens / seconds)
    return outputs


def _result(
    one: _Running, temperature: float, delay_ms: float | None, plain: Sequence[float] | None
) -> OverlapResult:
    metrics = one.router.metrics
    drafted = metrics.value("specray_spec_decode_num_draft_tokens_total")
    accepted = metrics.value("specray_spec_decode_num_accepted_tokens_total")
    hits = sum(_outcomes(metrics, result) for result in HITS)
    lookups = hits + sum(_outcomes(metrics, result) for result in MISSES)
    rounds = metrics.value("specray_rounds_total")
    return OverlapResult(
        arm=one.arm.name,
        temperature=temperature,
        tokens_per_s=one.num_tokens / one.seconds,
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_round=metrics.value("specray_output_tokens_total") / rounds if rounds else 0.0,
        hit_rate=hits / lookups if lookups else None,
        verify_ms=_mean_ms(metrics, "specray_verify_forward_seconds") or 0.0,
        draft_ms=_mean_ms(metrics, "specray_draft_forward_seconds"),
        idle_ms=_mean_ms(metrics, "specray_target_idle_seconds") or 0.0,
        delay_ms=delay_ms,
        bytes_per_round=None if delay_ms is None else one.num_bytes / (rounds - one.num_rounds),
        speedup=None if plain in (None, one.rates) else speedup_in_turns(one.rates, plain),
        plans=_plans(metrics),
    )


def _plans(metrics: RouterMetrics) -> dict[str, float]:
    """Share of the rounds by plan, the most frequent first."""
    counts = {
        f"{labels['overlap']} K={labels['num_speculative_tokens']} {labels['reason']}": count
        for labels, count in metrics.samples("specray_plans_total")
    }
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {plan: count / sum(counts.values()) for plan, count in ordered}


def _outcomes(metrics: RouterMetrics, result: str) -> float:
    return metrics.value("specray_outcomes_total", [("result", result)])


def _mean_ms(metrics: RouterMetrics, name: str) -> float | None:
    count = metrics.value(f"{name}_count")
    return 1e3 * metrics.value(f"{name}_sum") / count if count else None


_CAPTION = (
    "acc: draft tokens accepted; E: tokens a round; hits: verdicts foreseen; V, D, idle: mean ms of a "
    "verification, of a draft step, between verifications; ratio: to the best serial arm; vs off: by passes"
)
_LINK_CAPTION = "; delay: ms each way; bytes: a round's, to and from the draft"


def overlap_table(results: Sequence[OverlapResult]) -> Table:
    """Makes a table; the column "ratio" compares with the fastest serial arm of the same temperature."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    has_link = any(result.delay_ms is not None for result in results)
    link = ("delay", "bytes") if has_link else ()
    numbers = ("at once", "temp", *link, "tok/s", "acc", "E", "hits", "V", "D", "idle", "ratio", "vs off")
    table = Table(
        Column("arm", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in numbers),
        title="overlap",
        caption=_CAPTION + (_LINK_CAPTION if has_link else ""),
        box=SIMPLE_HEAD,
        padding=0,
    )
    for result in results:
        serial = [
            other.tokens_per_s
            for other in results
            if other.arm.startswith(Overlap.SERIAL) and other.is_like(result)
        ]
        table.add_row(
            result.arm,
            str(result.concurrency),
            f"{result.temperature:g}",
            *(_number(value) for value in (result.delay_ms, result.bytes_per_round) if has_link),
            f"{result.tokens_per_s:.1f}",
            _share(result.acceptance_rate),
            f"{result.tokens_per_round:.2f}",
            _share(result.hit_rate),
            f"{result.verify_ms:.1f}",
            "–" if result.draft_ms is None else f"{result.draft_ms:.1f}",
            f"{result.idle_ms:.1f}",
            f"{result.tokens_per_s / max(serial):.2f}" if serial else "–",
            "–" if result.speedup is None else "{:.2f}±{:.2f}".format(*result.speedup),
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
