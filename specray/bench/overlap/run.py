"""Compares overlap modes and K: one pair of workers without Ray, a router per arm, in turns.

The engines may have cores of their own, so that on one machine they share nothing but the memory. Every arm
produces the same tokens, in float32; only the time differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specray.bench.core.arm import Arm
from specray.bench.core.figures import Tally
from specray.bench.core.report import number, table_of
from specray.bench.core.samples import Samples, hit_rate, mean_ms, parse_samples, total
from specray.bench.core.service import request_of, running_all, timed
from specray.bench.core.turns import Speedup, in_turns, speedup_in_turns
from specray.bench.load.prompts import load_prompts
from specray.bench.overlap.link import linked_pair
from specray.config import Config, parse_config
from specray.errors import ConfigError
from specray.serving.local.pair import LocalPair
from specray.tokenization import load_tokenizer
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap

if TYPE_CHECKING:
    from rich.table import Table

    from specray.bench.overlap.link import CountedLink, Hosts
    from specray.bench.plans import OverlapPlan

HITS = ("hit", "late_hit")
MISSES = ("miss_token", "miss_count", "late_miss")
_STRIDE = 37
"""Stride of output lengths, so that neighbours are not alike."""


def overlap_arm(num_speculative_tokens: int | str, overlap: Overlap | str, tree: str | None = None) -> Arm:
    """One mode: K, and how the engines take turns. K = 0 is plain decoding.

    Args:
        tree: trees as ``speculation.tree`` has them; None: as configured.
    """
    k = num_speculative_tokens
    shape = {} if tree is None else {"tree": tree}
    name = "off" if k == 0 else " ".join([f"{overlap} K={k}", *(f"tree={tree}" for tree in shape.values())])
    speculation = {"num_speculative_tokens": k, "overlap": str(overlap), **shape}
    return Arm(name, {"speculation": speculation}, is_plain=k == 0)


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
    speedup: Speedup | None = None
    """Speedup over plain decoding, pass by pass, and its standard error; None: no plain arm, or too few
    passes."""
    plans: dict[str, float] = field(default_factory=dict)
    """Share of the rounds by plan: overlap, K and reason."""

    def is_like(self, other: OverlapResult) -> bool:
        mine, others = ((result.concurrency, result.temperature, result.delay_ms) for result in (self, other))
        return mine == others


def parse_arm(text: str) -> Arm:
    """Reads ``OVERLAP:K`` or ``OVERLAP:K:TREE``, the tree as ``--tree`` has it. Raises ConfigError."""
    overlap, _, rest = text.partition(":")
    k, has_tree, tree = rest.partition(":")
    overlaps = [*(str(known) for known in Overlap), "auto", "off"]
    is_k = k == "auto" or (k.isdecimal() and int(k) <= MAX_SPECULATIVE_TOKENS)
    if overlap not in overlaps or not is_k or (overlap == "off") != (k == "0") or (k == "0" and has_tree):
        raise ConfigError(
            f"--arm is {text!r}; allowed: OVERLAP:K with OVERLAP one of {', '.join(overlaps[:-1])} and K in "
            f"1..{MAX_SPECULATIVE_TOKENS} or auto, then :TREE or nothing, or off:0"
        )
    if overlap == "off":
        return overlap_arm(0, Overlap.SERIAL)
    if has_tree:
        parse_config({"speculation": {"tree": tree}})
    return overlap_arm(int(k) if k.isdecimal() else k, overlap, tree if has_tree else None)


async def measure_overlap(
    config: Config,
    plan: OverlapPlan,
    *,
    delay_ms: float | None = None,
    hosts: Hosts | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[OverlapResult]:
    """Serves the prompts with each arm in turns, at each concurrency and temperature by itself.

    Args:
        config: configuration of the pair, its cores and threads.
        delay_ms: delay between router and draft, each way; None: a direct connection.
        hosts: hosts of router and draft whose cable delays; None: a relay does.
        progress: called with the name of the next part.

    Raises like ``local_pair``.
    """
    arms = [parse_arm(text) for text in plan.arms]
    concurrencies = plan.concurrency or [1]
    tokenizer = load_tokenizer(config.target.model)
    most = max(num_prompts_of(plan.num_prompts, places) for places in concurrencies)
    prompts = [tokenizer.encode(text) for text in load_prompts(plan.dataset, plan.dataset_path, most)]
    results: list[OverlapResult] = []
    async with linked_pair(config, delay_ms=delay_ms, hosts=hosts) as (pair, link):
        for concurrency in concurrencies:
            results += await measure_arms(
                config,
                pair,
                arms,
                prompts[: num_prompts_of(plan.num_prompts, concurrency)],
                temperatures=plan.temperature or [0.0],
                max_tokens=plan.max_tokens,
                num_repeats=plan.num_repeats,
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
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    num_repeats: int,
    link: CountedLink | None = None,
    delay_ms: float | None = None,
    concurrency: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    on_output: Callable[[Arm, float, int, Sequence[int]], None] = lambda *_: None,
) -> list[OverlapResult]:
    """Serves the prompts with a pair that runs already; see :func:`measure_overlap`.

    Args:
        prompts: prompts as token ids.
        link: connection of router and draft.
        on_output: called for each output after the warm-up: arm, temperature, prompt's index, token ids.
    """
    results: list[OverlapResult] = []
    for temperature in temperatures:
        where = (temperature, concurrency, delay_ms)
        tallies = {arm.name: Tally() for arm in arms}
        rounds_before = dict[str, float]()
        num_bytes = dict.fromkeys(tallies, 0)
        async with running_all({arm.name: (pair, arm.config(config)) for arm in arms}) as routers:
            # The first turn warms up caches and threads, and lets the controller learn.
            for turn, _, arm in in_turns(arms, num_repeats, num_warmup=1):
                router = routers[arm.name]
                at = f"{concurrency} at a time, temperature {temperature:g}"
                progress(f"{at}, {arm.name}, pass {max(turn, 0) + 1}")
                batch = prompts if turn >= 0 else prompts[:concurrency]
                lengths = lengths_of(len(batch), max_tokens, concurrency)
                label = f"{arm.name}-{temperature:g}-{turn}"
                before = 0 if link is None else link.num_bytes
                requests = (
                    request_of(f"{label}-{index}", prompt, length, temperature=temperature, seed=index)
                    for index, (prompt, length) in enumerate(zip(batch, lengths, strict=True))
                )
                outputs, seconds = await timed(router, requests, concurrency=concurrency)
                if turn < 0:
                    rounds_before[arm.name] = router.metrics.value("specray_rounds_total")
                    continue
                num_bytes[arm.name] += 0 if link is None else link.num_bytes - before
                tallies[arm.name].begin_turn()
                tallies[arm.name].seconds[-1] = seconds
                for index, output in enumerate(outputs):
                    tallies[arm.name].num_tokens[-1] += len(output.token_ids)
                    on_output(arm, temperature, index, output.token_ids)
            samples = {name: parse_samples(router.metrics.text()) for name, router in routers.items()}
        plain = next((tallies[arm.name] for arm in arms if arm.is_plain), None)
        for arm in arms:
            num_rounds = (total(samples[arm.name], "specray_rounds_total") or 0.0) - rounds_before[arm.name]
            sent = None if delay_ms is None else num_bytes[arm.name] / num_rounds
            results.append(_result(arm, where, tallies[arm.name], plain, samples[arm.name], sent))
    return results


def lengths_of(num_prompts: int, max_tokens: int, concurrency: int) -> list[int]:
    """Returns the output tokens of each prompt: with several at a time, 0.5 to 1.5 times ``max_tokens``.

    With equal lengths and no speculation all outputs would end in the same step, and the next prompts would
    be prefilled together while nobody waits: not as in service, and not as with speculation.
    """
    if concurrency == 1:
        return [max_tokens] * num_prompts
    spread = max_tokens // 2
    return [max(1, max_tokens - spread + index * _STRIDE % (2 * spread + 1)) for index in range(num_prompts)]


def _result(
    arm: Arm,
    where: tuple[float, int, float | None],
    tally: Tally,
    plain: Tally | None,
    samples: Samples,
    bytes_per_round: float | None,
) -> OverlapResult:
    drafted = total(samples, "specray_spec_decode_num_draft_tokens_total")
    accepted = total(samples, "specray_spec_decode_num_accepted_tokens_total") or 0.0
    rounds = total(samples, "specray_rounds_total")
    temperature, concurrency, delay_ms = where
    return OverlapResult(
        arm=arm.name,
        temperature=temperature,
        tokens_per_s=sum(tally.num_tokens) / sum(tally.seconds),
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_round=(total(samples, "specray_output_tokens_total") or 0.0) / rounds if rounds else 0.0,
        hit_rate=hit_rate(samples, HITS),
        verify_ms=mean_ms(samples, "specray_verify_forward_seconds") or 0.0,
        draft_ms=mean_ms(samples, "specray_draft_forward_seconds"),
        idle_ms=mean_ms(samples, "specray_target_idle_seconds") or 0.0,
        concurrency=concurrency,
        delay_ms=delay_ms,
        bytes_per_round=bytes_per_round,
        speedup=None if plain in (None, tally) else speedup_in_turns(tally.rates, plain.rates),
        plans=_plans(samples),
    )


def _plans(samples: Samples) -> dict[str, float]:
    """Share of the rounds by plan, the most frequent first."""
    counts = {
        "{overlap} K={num_speculative_tokens} {reason}".format(**dict(labels)): count
        for (name, labels), count in samples.items()
        if name == "specray_plans_total"
    }
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {plan: count / sum(counts.values()) for plan, count in ordered}


_CAPTION = (
    "acc: draft tokens accepted; E: tokens a round; hits: verdicts foreseen; V, D, idle: mean ms of a "
    "verification, of a draft step, between verifications; ratio: to the best serial arm; vs off: by passes"
)


def overlap_table(results: Sequence[OverlapResult]) -> Table:
    """Makes a table; the column "ratio" compares with the fastest serial arm of the same temperature."""
    has_link = any(result.delay_ms is not None for result in results)

    def ratio(result: OverlapResult) -> float | None:
        alike = [other for other in results if other.is_like(result) and other.arm.startswith(Overlap.SERIAL)]
        return result.tokens_per_s / max(other.tokens_per_s for other in alike) if alike else None

    columns: dict[str, Callable[[OverlapResult], object]] = {
        "arm": lambda result: result.arm,
        "at once": lambda result: result.concurrency,
        "temp": lambda result: f"{result.temperature:g}",
        "delay": lambda result: number(result.delay_ms, 0),
        "bytes": lambda result: number(result.bytes_per_round, 0),
        "tok/s": lambda result: number(result.tokens_per_s, 1),
        "acc": lambda result: result.acceptance_rate,
        "E": lambda result: result.tokens_per_round,
        "hits": lambda result: result.hit_rate,
        "V": lambda result: number(result.verify_ms, 1),
        "D": lambda result: number(result.draft_ms, 1),
        "idle": lambda result: number(result.idle_ms, 1),
        "ratio": ratio,
        "vs off": lambda result: result.speedup and "{:.2f}±{:.2f}".format(*result.speedup),
    }
    if not has_link:
        del columns["delay"], columns["bytes"]
    link = "; delay: ms each way; bytes: a round's, to and from the draft" if has_link else ""
    return table_of("overlap", columns, results, caption=_CAPTION + link, is_narrow=True)
