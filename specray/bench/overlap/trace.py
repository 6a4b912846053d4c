"""A router's trace: recorded over a short load, fetched from a running server or read; and its summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
from rich.table import Table

from specray.bench.core.report import DASH, grid_of, number, table_of
from specray.bench.core.service import ask_all, request_of, trace_of
from specray.bench.load.client import key_header
from specray.bench.overlap.run import HITS, MISSES
from specray.bench.overlap.timeline import Summary, Timeline, changed_decisions, changed_plans
from specray.bench.overlap.timeline_chart import plan_text, shortened
from specray.config import Config
from specray.environment import api_key
from specray.errors import ConfigError, EngineLostError
from specray.router.session.values import FALLBACK
from specray.router.trace import Decided, Planned, TraceEvent
from specray.serving.local.pair import local_router
from specray.tokenization import load_tokenizer

T = TypeVar("T")

_MAX_ROWS = 16
"""Rows of a table of changes."""


async def record(
    config: Config, prompts: Sequence[str], *, num_sessions: int, max_tokens: int, temperature: float
) -> list[TraceEvent]:
    """Starts the pair without Ray and serves the prompts, ``num_sessions`` at a time.

    Raises like ``local_pair``.
    """
    encode = load_tokenizer(config.target.model).encode
    requests = [
        request_of(f"session {index + 1}", encode(prompt), max_tokens, temperature=temperature, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    async with local_router(config) as router:
        await ask_all(router, requests, concurrency=num_sessions)
        return await trace_of(router)


async def fetch(url: str) -> str:
    """The trace of a running server, as JSON lines.

    Raises:
        ConfigError: it keeps none.
        EngineLostError: it does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=30.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=key_header(api_key())) as session,
            session.get(f"{url.rstrip('/')}/debug/trace") as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineLostError(f"{url} does not answer: {error or 'timeout'}") from None
    if response.status == 404:
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
    ordered = sorted(summary.reasons.items(), key=lambda one: (-one[1], one[0]))
    rows = [(reason, count, f"{100 * count / total:.1f} %") for reason, count in ordered]
    return grid_of("plans by reason", ["reason", "plans", "share"], rows)


def _first(changes: Sequence[T]) -> tuple[Sequence[T], str | None]:
    hidden = len(changes) - _MAX_ROWS
    return changes[:_MAX_ROWS], f"and {hidden} more" if hidden > 0 else None


def plans_table(timeline: Timeline) -> Table:
    """Changes of sessions' plans with their reasons, and the goodput predicted for each overlap."""
    changes = [plan for plan in changed_plans(timeline) if plan.source != FALLBACK]
    shown, caption = _first(changes)
    columns: dict[str, Callable[[Planned], object]] = {
        "ms": lambda plan: number((plan.ns - timeline.start_ns) / 1e6, 1),
        "session": lambda plan: shortened(plan.request_id, 16),
        "plan": plan_text,
        "reason": lambda plan: plan.reason,
        "running": lambda plan: plan.num_running,
        "acceptance": lambda plan: plan.acceptance,
        "off": lambda plan: number(plan.tokens_per_s.get("off"), 0),
        "serial": lambda plan: number(plan.tokens_per_s.get("serial"), 0),
        "ahead": lambda plan: number(plan.tokens_per_s.get("ahead"), 0),
        "enumerate": lambda plan: number(plan.tokens_per_s.get("enumerate"), 0),
    }
    title = "changes of plan, and the tokens/s predicted for the best plan of each overlap"
    return table_of(title, columns, shown, text=("session", "plan", "reason"), caption=caption)


def decisions_table(timeline: Timeline) -> Table:
    """Changes of the mode of all sessions, and experiments."""
    shown, caption = _first(changed_decisions(timeline))
    rows: list[tuple[object, ...]] = []
    for event in shown:
        ms = number((event.ns - timeline.start_ns) / 1e6, 1)
        if isinstance(event, Decided):
            tried = "" if event.tried is None else f", trying {event.tried}"
            speedups = (event.predicted_speedup, event.calibrated_speedup, DASH)
            rows.append((ms, f"{event.mode}{tried}", event.num_running, *speedups))
        else:
            measured = "given up" if event.measured_speedup is None else event.measured_speedup
            rows.append((ms, f"tried {event.tried}", DASH, event.predicted_speedup, DASH, measured))
    return grid_of(
        "modes of all sessions, and experiments; speedups over plain decoding",
        ["ms", "event", "running", "predicted", "calibrated", "measured"],
        rows,
        text=("event",),
        caption=caption,
    )
