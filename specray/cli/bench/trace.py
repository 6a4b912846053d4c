"""``specray bench trace``: what the router decided, and a timeline of draft and target."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli.bench.overlap import cores
from specray.cli.serve import Setting
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.overlap.timeline import Timeline
    from specray.bench.report.timeline_chart import Window

TRACE_EVENTS = 200_000
"""Kept for a load of our own."""
_FILE_WIDTH = 120
"""Of the tables where no terminal says how wide it is."""


def trace(
    file: Annotated[Path | None, typer.Option(help="A trace that was saved with --jsonl.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server with router.trace_events set.")] = None,
    target: Annotated[str, typer.Option(help="Without --file and --url: path, hub id, or embedded.")] = (
        "embedded"
    ),
    draft: Annotated[str, typer.Option(help="Path, hub id, or embedded.")] = "embedded",
    target_cores: Annotated[str | None, typer.Option(help="Cores of the target: 0 or 0,1.")] = None,
    draft_cores: Annotated[str | None, typer.Option(help="Cores of the draft: 0 or 0,1.")] = None,
    overlap: Annotated[str, typer.Option(help="serial, ahead, enumerate or auto.")] = "auto",
    num_speculative_tokens: Annotated[str, typer.Option(help="0..32 or auto.")] = "auto",
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 2,
    num_sessions: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 96,
    max_model_len: Annotated[int, typer.Option(min=16, help="Most tokens of one sequence.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    settings: Setting = None,
    start_ms: Annotated[
        float | None, typer.Option(min=0, help="Where the plot begins; default: it ends with the trace.")
    ] = None,
    length_ms: Annotated[float, typer.Option(min=0.1, help="How much it shows.")] = 300.0,
    svg: Annotated[Path, typer.Option(help="The plot is written there.")] = Path("trace.svg"),
    jsonl: Annotated[Path | None, typer.Option(help="The trace itself is written there.")] = None,
) -> None:
    """Plot when draft and target worked, and print what the router decided.

    The trace comes from a file, from a running server, or from a short load on a pair of its own.
    """
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.overlap import trace as traces
    from specray.bench.overlap.timeline import make_timeline, summarize
    from specray.bench.report.timeline_chart import draw_timeline
    from specray.cli.settings import build_config
    from specray.router.trace import decode_trace, encode_trace

    if file is not None and url is not None:
        raise ConfigError("--file and --url are both given; allowed: one of them, or neither")
    if file is not None:
        events = decode_trace(traces.read(file))
    elif url is not None:
        events = decode_trace(asyncio.run(traces.fetch(url)))
    else:
        options: dict[str, object] = {
            "target.model": target,
            "draft.model": draft,
            "target.max_model_len": max_model_len,
            "draft.max_model_len": max_model_len,
            "target.cores": cores(target_cores),
            "draft.cores": cores(draft_cores),
            "speculation.overlap": overlap,
            "speculation.num_speculative_tokens": num_speculative_tokens,
            "router.trace_events": TRACE_EVENTS,
        }
        config = build_config(None, options, settings or [])
        prompts = load_prompts(dataset, dataset_path, num_prompts)
        with Console(stderr=True).status("starting the pair"):
            events = asyncio.run(
                traces.record(
                    config,
                    prompts,
                    num_sessions=num_sessions,
                    max_tokens=max_tokens,
                    temperature=temperature,
                )
            )
    timeline = make_timeline(events)
    summary = summarize(timeline, events)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(traces.summary_table(summary))
    if summary.reasons:
        console.print(traces.reasons_table(summary))
    console.print(traces.plans_table(timeline))
    if timeline.decisions:
        console.print(traces.decisions_table(timeline))
    if jsonl is not None:
        _write(jsonl, encode_trace(events), "--jsonl")
    window = _window(timeline, start_ms, length_ms)
    _write(svg, draw_timeline(timeline, summary, window, title="Draft and target"), "--svg")
    console.print(f"timeline: {svg}", highlight=False)


def _window(timeline: Timeline, start_ms: float | None, length_ms: float) -> Window:
    from specray.bench.report.timeline_chart import Window

    if not timeline.spans:
        raise ConfigError("the trace has no item with its answer; nothing can be drawn")
    last_ms = (timeline.end_ns - timeline.start_ns) / 1e6
    if start_ms is None:
        start_ms = max(0.0, last_ms - length_ms)
    start_ns = timeline.start_ns + round(start_ms * 1e6)
    if start_ns >= timeline.end_ns:
        raise ConfigError(f"--start-ms is {start_ms:g}; allowed: less than {last_ms:g}")
    return Window(start_ns, min(timeline.end_ns, start_ns + round(length_ms * 1e6)))


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None
