"""A router's trace: recorded over a short load, fetched from a running server or read; and its summary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.table import Table

from specray.bench.load.client import key_header
from specray.bench.overlap.run import HITS, MISSES
from specray.bench.overlap.timeline import Summary, Timeline, changed_decisions, changed_plans
from specray.bench.report.timeline_chart import plan_text, shortened
from specray.config import Config
from specray.environment import api_key
from specray.errors import ConfigError, EngineLostError
from specray.requests import GenerateRequest
from specray.router.session.values import FALLBACK
from specray.router.trace import Decided, TraceEvent, decode_trace
from specray.serving.local.pair import local_router
from specray.tokenization import load_tokenizer
from specray.types import SamplingParams

FETCH_TIMEOUT_S = 30.0
_NOT_FOUND = 404


async def record(
    config: Config, prompts: Sequence[str], *, num_sessions: int, max_tokens: int, temperature: float
) -> list[TraceEvent]:
    """Starts the pair without Ray and serves the prompts, ``num_sessions`` at a time.

    Raises:
        ConfigError: a model or a setting is wrong.
        EngineLostError: a worker did not start or was lost.
    """
    tokenizer = load_tokenizer(config.target.model)
    places = asyncio.Semaphore(num_sessions)
    async with local_router(config) as router:

        async def serve(index: int, prompt: str) -> None:
            token_ids = tuple(tokenizer.encode(prompt))
            sampling = SamplingParams(temperature=temperature, seed=index, num_prompt_tokens=len(token_ids))
            async with places:
                await router.complete(
                    GenerateRequest(f"session {index + 1}", token_ids, sampling, max_tokens)
                )

        await asyncio.gather(*(serve(index, prompt) for index, prompt in enumerate(prompts)))
        text = await router.trace_text()
    return decode_trace(text or "")


async def fetch(url: str) -> str:
    """The trace of a running server, as JSON lines.

    Raises:
        ConfigError: it keeps none.
        EngineLostError: it does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=key_header(api_key())) as session,
            session.get(f"{url.rstrip('/')}/debug/trace") as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineLostError(f"{url} does not answer: {error or 'timeout'}") from None
    if response.status == _NOT_FOUND:
        raise ConfigError(f"{url} keeps no trace; serve with --set router.trace_events=20000")
    if response.status != 200:
        raise EngineLostError(f"{url} answered {response.status}")
    return text


def read(path: Path) -> str:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {path}: {getattr(error, 'strerror', None) or error}") from None


def summary_table(summary: Summary) -> Table:
    """Shares of time, and what became of the outcomes."""
    table = Table(title=f"{summary.active_ns / 1e9:.2f} s with sessions", show_header=False)
    for label, share in (
        ("target idle", summary.target_idle),
        ("draft busy", summary.draft_busy),
        ("both at once", summary.both_busy),
    ):
        table.add_row(label, f"{100 * share:.1f} %")
    table.add_row("tokens / rounds", f"{summary.num_tokens} / {summary.num_rounds}")
    if summary.first_token_s is not None:
        table.add_row("first token", f"{1e3 * summary.first_token_s:.0f} ms")
    if summary.later_tokens_per_s is not None:
        table.add_row("a session after it", f"{summary.later_tokens_per_s:.1f} tokens/s")
    if summary.num_draft_tokens:
        rate = summary.num_accepted_tokens / summary.num_draft_tokens
        table.add_row("draft tokens accepted", f"{100 * rate:.1f} % of {summary.num_draft_tokens}")
    total = sum(summary.lookups.values())
    for result in (*HITS, *MISSES):
        if count := summary.lookups.get(result):
            table.add_row(result.replace("_", " "), f"{100 * count / total:.1f} % of {total}")
    return table


def reasons_table(summary: Summary) -> Table:
    """Why rounds had their plans: each reason with its verdicts, the most frequent first."""
    total = sum(summary.reasons.values())
    table = Table(title="plans by reason")
    for heading in ("reason", "plans", "share"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "reason" else "right")
    for reason, count in sorted(summary.reasons.items(), key=lambda one: (-one[1], one[0])):
        table.add_row(reason, str(count), f"{100 * count / total:.1f} %")
    return table


def plans_table(timeline: Timeline, *, max_rows: int = 16) -> Table:
    """Changes of sessions' plans with their reasons, and the goodput predicted for each overlap."""
    overlaps = ("off", "serial", "ahead", "enumerate")
    changes = [plan for plan in changed_plans(timeline) if plan.source != FALLBACK]
    hidden = len(changes) - max_rows
    table = Table(
        title="changes of plan, and the tokens/s predicted for the best plan of each overlap",
        caption=f"and {hidden} more" if hidden > 0 else None,
    )
    for heading in ("ms", "session", "plan", "reason"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "ms" else "left")
    for heading in ("running", "acceptance", *overlaps):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in changes[:max_rows]:
        predicted = [plan.tokens_per_s.get(overlap) for overlap in overlaps]
        table.add_row(
            f"{(plan.ns - timeline.start_ns) / 1e6:.1f}",
            shortened(plan.request_id, 16),
            plan_text(plan),
            plan.reason,
            str(plan.num_running),
            f"{plan.acceptance:.2f}",
            *("–" if value is None else f"{value:.0f}" for value in predicted),
        )
    return table


def decisions_table(timeline: Timeline, *, max_rows: int = 16) -> Table:
    """Changes of the mode of all sessions, and experiments."""
    changes = changed_decisions(timeline)
    hidden = len(changes) - max_rows
    table = Table(
        title="modes of all sessions, and experiments; speedups over plain decoding",
        caption=f"and {hidden} more" if hidden > 0 else None,
    )
    for heading in ("ms", "event", "running", "predicted", "calibrated", "measured"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "event" else "right")
    for event in changes[:max_rows]:
        ms = f"{(event.ns - timeline.start_ns) / 1e6:.1f}"
        if isinstance(event, Decided):
            tried = "" if event.tried is None else f", trying {event.tried}"
            speedups = (f"{event.predicted_speedup:.2f}", f"{event.calibrated_speedup:.2f}", "–")
            table.add_row(ms, f"{event.mode}{tried}", str(event.num_running), *speedups)
        else:
            measured = "given up" if event.measured_speedup is None else f"{event.measured_speedup:.2f}"
            table.add_row(ms, f"tried {event.tried}", "–", f"{event.predicted_speedup:.2f}", "–", measured)
    return table
