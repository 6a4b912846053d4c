"""``specray bench trace``: the router's decisions, and a timeline of draft and target."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset, load_prompts
from specray.cli import options
from specray.cli.bench.overlap import DraftCores, MaxModelLen, TargetCores, cores
from specray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specray.bench.overlap.timeline import Timeline
    from specray.bench.overlap.timeline_chart import Window
    from specray.config import Config
    from specray.router.trace import TraceEvent


TraceFile = Annotated[Path | None, typer.Option(help="A trace that was saved with --jsonl.")]
TraceUrl = Annotated[str | None, typer.Option(help="URL of a server that runs with router.trace_events.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of requests.")]
NumSessions = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
StartMs = Annotated[
    float | None,
    typer.Option(min=0, help="Start of the plot in the trace, in ms; default: it shows the trace's end."),
]
LengthMs = Annotated[float, typer.Option(min=0.1, help="Length of the plot in ms.")]
SvgPath = Annotated[Path, typer.Option(help="File for the plot.")]
JsonlPath = Annotated[Path | None, typer.Option(help="File for the trace itself (JSON lines).")]


def trace(
    file: TraceFile = None,
    url: TraceUrl = None,
    target: options.TargetModel = "embedded",
    draft: options.DraftModel = "embedded",
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    overlap: options.OverlapMode = "auto",
    num_speculative_tokens: options.NumSpeculativeTokens = "auto",
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: NumPrompts = 2,
    num_sessions: NumSessions = 1,
    max_tokens: options.MaxTokens = 96,
    max_model_len: MaxModelLen = 1024,
    temperature: options.Temperature = 0.0,
    settings: options.Settings = None,
    start_ms: StartMs = None,
    length_ms: LengthMs = 300.0,
    svg: SvgPath = Path("trace.svg"),
    jsonl: JsonlPath = None,
) -> None:
    """Plot when draft and target worked, and print what the router decided.

    The trace comes from --file, from a running server (--url), or else from a short load on a pair that this
    command starts; the options for models, prompts and speculation are for that pair.
    """
    from specray.cli.settings import build_config

    if file is not None and url is not None:
        raise ConfigError("--file and --url are both given; allowed: one of them, or neither")
    if file is not None or url is not None:
        events = _read(file, url)
    else:
        values: dict[str, object] = {
            "target.model": target,
            "draft.model": draft,
            "target.max_model_len": max_model_len,
            "draft.max_model_len": max_model_len,
            "target.cores": cores(target_cores),
            "draft.cores": cores(draft_cores),
            "speculation.overlap": overlap,
            "speculation.num_speculative_tokens": num_speculative_tokens,
            # Maximum events kept of a load that this command makes itself.
            "router.trace_events": 200_000,
        }
        config = build_config(None, values, settings or [])
        prompts = load_prompts(dataset, dataset_path, num_prompts)
        events = _record(config, prompts, num_sessions, max_tokens, temperature)
    _show(events, start_ms, length_ms, svg, jsonl)


def _read(file: Path | None, url: str | None) -> list[TraceEvent]:
    from specray.bench.overlap import trace as traces
    from specray.router.trace import decode_trace

    if file is not None:
        return decode_trace(traces.read(file))
    assert url is not None, "a trace is read from a file or a server"
    return decode_trace(asyncio.run(traces.fetch(url)))


def _record(
    config: Config, prompts: Sequence[str], num_sessions: int, max_tokens: int, temperature: float
) -> list[TraceEvent]:
    from rich.console import Console

    from specray.bench.overlap.trace import record

    with Console(stderr=True).status("starting the pair"):
        return asyncio.run(
            record(config, prompts, num_sessions=num_sessions, max_tokens=max_tokens, temperature=temperature)
        )


def _show(
    events: list[TraceEvent], start_ms: float | None, length_ms: float, svg: Path, jsonl: Path | None
) -> None:
    from specray.bench.overlap import trace as traces
    from specray.bench.overlap.timeline import make_timeline, summarize
    from specray.bench.overlap.timeline_chart import draw_timeline
    from specray.cli.output import wide_console, write_text
    from specray.router.trace import encode_trace

    timeline = make_timeline(events)
    summary = summarize(timeline, events)
    console = wide_console()
    console.print(traces.summary_table(summary))
    if summary.reasons:
        console.print(traces.reasons_table(summary))
    console.print(traces.plans_table(timeline))
    if timeline.decisions:
        console.print(traces.decisions_table(timeline))
    if jsonl is not None:
        write_text(jsonl, encode_trace(events), "--jsonl")
    window = _window(timeline, start_ms, length_ms)
    write_text(svg, draw_timeline(timeline, summary, window, title="Draft and target"), "--svg")
    console.print(f"timeline: {svg}", highlight=False)


def _window(timeline: Timeline, start_ms: float | None, length_ms: float) -> Window:
    from specray.bench.overlap.timeline_chart import Window

    if not timeline.spans:
        raise ConfigError("the trace has no item with its answer; nothing can be drawn")
    last_ms = (timeline.end_ns - timeline.start_ns) / 1e6
    if start_ms is None:
        start_ms = max(0.0, last_ms - length_ms)
    start_ns = timeline.start_ns + round(start_ms * 1e6)
    if start_ns >= timeline.end_ns:
        raise ConfigError(f"--start-ms is {start_ms:g}; allowed: less than {last_ms:g}")
    return Window(start_ns, min(timeline.end_ns, start_ns + round(length_ms * 1e6)))
