"""``specray bench``: a running server, or the parts of one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from specray.bench.load.prompts import Dataset
from specray.cli.bench.compare import compare
from specray.cli.bench.output import write_json
from specray.cli.bench.overlap import overlap
from specray.cli.bench.overload import overload
from specray.cli.bench.plain import plain
from specray.cli.bench.soak import soak
from specray.cli.bench.trace import trace
from specray.cli.worker import Role
from specray.types import Overlap

if TYPE_CHECKING:
    from specray.bench.load.serve import Plan, Result

DEFAULT_URL = "http://127.0.0.1:8000"
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the results there.")]


class Transport(StrEnum):
    UNIX = "unix"
    TCP = "tcp"


class _ServeByDefault(TyperGroup):
    """``specray bench [OPTIONS]`` is ``specray bench serve [OPTIONS]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["serve", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_ServeByDefault,
    help="Measure a running server with speculation on and off (serve, the default), or the parts of one.",
)
app.command()(compare)
app.command()(overlap)
app.command()(soak)
app.command()(overload)
app.command()(plain)
app.command()(trace)


@app.callback()
def _root() -> None:
    """Measure a running server with speculation on and off (serve, the default), or the parts of one."""


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server.")] = DEFAULT_URL,
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per pass.")] = 12,
    num_repeats: Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every request.")] = 0,
    num_warmup: Annotated[int, typer.Option(min=0, help="Requests per arm that are not counted.")] = 2,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option(min=0, max=32, help="One more arm with this K; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Every output has max-tokens tokens.")] = True,
    stream: Annotated[
        bool, typer.Option(help="Stream the outputs; without, there is no TTFT and ITL.")
    ] = True,
    fresh_prompts: Annotated[
        bool,
        typer.Option(help="Each arm and pass has prompts of its own, which no cache knows."),
    ] = True,
    timeout_s: Annotated[float, typer.Option(min=1, help="For one request.")] = 600.0,
    json_path: JsonPath = None,
) -> None:
    """Measure a running server over HTTP, speculation off and on in turns."""
    from specray.bench.load.prompts import load_prompts
    from specray.bench.load.serve import Plan, default_arms

    plan = Plan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        arms=default_arms(num_speculative_tokens or ()),
        num_repeats=num_repeats,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        is_stream=stream,
        num_warmup=num_warmup,
        has_fresh_prompts=fresh_prompts,
        timeout_s=timeout_s,
    )
    raise typer.Exit(_report(_run(plan), json_path))


@app.command()
def router(
    mode: Annotated[Overlap, typer.Option("--overlap", help="The loop and its fan-out.")] = Overlap.ENUMERATE,
    num_speculative_tokens: Annotated[int, typer.Option(min=0, max=32, help="K.")] = 3,
    num_sessions: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; may be repeated.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 1000,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="How often the draft is right.")] = 0.6,
    json_path: JsonPath = None,
) -> None:
    """Measure the router's own work per target step, with engines that cost nothing."""
    from specray.bench.router import measure_router

    costs = [
        measure_router(
            overlap=mode,
            num_speculative_tokens=num_speculative_tokens,
            num_sessions=sessions,
            num_tokens=num_tokens,
            agreement=agreement,
        )
        for sessions in num_sessions or [1, 8, 32]
    ]
    _print_rows("router", costs, json_path)


@app.command()
def rpc(
    transport: Annotated[Transport, typer.Option(help="Between router and worker.")] = Transport.UNIX,
    num_sessions: Annotated[
        list[int] | None, typer.Option(min=1, help="Items per batch; may be repeated.")
    ] = None,
    num_rounds: Annotated[int, typer.Option(min=1, help="Round trips.")] = 2000,
    num_draft_tokens: Annotated[int, typer.Option(min=0, max=32, help="Per item.")] = 4,
    json_path: JsonPath = None,
) -> None:
    """Measure a round trip to a worker whose engine answers at once."""
    from specray.bench.rpc import measure_rpc

    trips = [
        measure_rpc(
            transport=transport.value,
            num_sessions=sessions,
            num_rounds=num_rounds,
            num_draft_tokens=num_draft_tokens,
        )
        for sessions in num_sessions or [1, 8, 32]
    ]
    _print_rows("rpc", trips, json_path)


@app.command()
def forwards(
    model: Annotated[str, typer.Option(help="Path, hub id, or embedded.")] = "embedded",
    role: Annotated[Role, typer.Option(help="Which of the embedded pair.")] = Role.TARGET,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="CPU threads; default: by cores.")] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="New tokens of each sequence; may be repeated.")
    ] = None,
    num_sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences side by side; may be repeated.")
    ] = None,
    context_len: Annotated[int, typer.Option(min=0, help="Tokens before it.")] = 256,
    num_repeats: Annotated[int, typer.Option(min=1, help="Measurements per width.")] = 50,
    json_path: JsonPath = None,
) -> None:
    """Measure an engine's forward against the least it can cost: reading its weights once."""
    from rich.console import Console
    from rich.progress import track

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import ROWS, forwards_table, measure_forwards
    from specray.cli.settings import build_config
    from specray.engine.runner.assembly import build_runner

    options = {"model": model, "dtype": dtype, "device": device, "num_threads": num_threads}
    other: dict[str, object] = {"draft.enabled": False} if role is Role.TARGET else {}
    config = build_config(None, {f"{role}.{key}": value for key, value in options.items()} | other)
    engine = config.draft if role is Role.DRAFT else config.target
    runner = build_runner(engine, role=role.value)
    widths = [(sequences, width) for sequences in num_sequences or [1] for width in rows or ROWS]
    costs = [
        cost
        for sequences, width in track(widths, "forwards", console=Console(stderr=True), transient=True)
        for cost in measure_forwards(
            runner,
            rows=[width],
            num_sequences=sequences,
            context_len=context_len,
            num_repeats=num_repeats,
        )
    ]
    Console().print(forwards_table(costs, title=f"{role} {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


@app.command()
def drafting(
    model: Annotated[str, typer.Option(help="Path, hub id, or embedded.")] = "embedded",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="CPU threads; default: by size.")] = None,
    num_sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences side by side; may be repeated.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, max=2, help="0 is greedy; may be repeated.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=32, help="K.")] = 4,
    context_len: Annotated[int, typer.Option(min=1, help="Tokens before the first round.")] = 256,
    num_repeats: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 50,
    json_path: JsonPath = None,
) -> None:
    """Measure what a draft token costs in a whole draft engine, without RPC."""
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import drafting_table, measure_drafting
    from specray.cli.settings import build_config
    from specray.engine.build import build_draft_engine

    options = {"model": model, "dtype": dtype, "device": device, "num_threads": num_threads}
    engine = build_draft_engine(build_config(None, {f"draft.{key}": value for key, value in options.items()}))
    costs = [
        measure_drafting(
            engine,
            num_sequences=sequences,
            temperature=heat,
            num_tokens=num_speculative_tokens,
            context_len=context_len,
            num_repeats=num_repeats,
        )
        for sequences in num_sequences or [1, 8, 32]
        for heat in temperature or [0.0, 1.0]
    ]
    Console().print(drafting_table(costs, title=f"draft {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


def _print_rows(title: str, rows: Sequence[Any], json_path: Path | None) -> None:
    """A table of equal dataclasses, one column per field."""
    from rich.console import Console
    from rich.table import Table

    values = [asdict(row) for row in rows]
    table = Table(*values[0], title=title)
    for row in values:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console().print(table)
    write_json(values, json_path)


def _run(plan: Plan) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specray.bench.load.serve import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warm-up", total=None)

        def show(name: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=f"speculation {name}", completed=num_done, total=num_all)

        return asyncio.run(measure(plan, show))


def _report(result: Result, json_path: Path | None) -> int:
    from rich.console import Console

    from specray.bench.report.table import serve_table

    console = Console()
    console.print(serve_table(result))
    write_json(result.as_json(), json_path)
    failures = [text for arm in result.arms for text in arm.errors]
    for failure in failures:
        Console(stderr=True).print(f"failed: {failure}", markup=False)
    return 1 if failures else 0
