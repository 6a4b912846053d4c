"""``specray bench plain``: plain decoding over HTTP against reading the target's weights once per token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli.bench.output import write_json

if TYPE_CHECKING:
    from specray.bench.load.serve import Plan
    from specray.bench.plain import PlainResult
    from specray.config import EngineConfig


def plain(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    target: Annotated[
        str, typer.Option(help="The checkpoint that it serves as its target: path, hub id, or embedded.")
    ] = "embedded",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, as served.")] = "bfloat16",
    num_threads: Annotated[int | None, typer.Option(help="CPU threads, as served; default: by size.")] = None,
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per turn.")] = 12,
    num_turns: Annotated[int, typer.Option(min=1, help="Of the forwards here and the prompts there.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    num_warmup: Annotated[int, typer.Option(min=0, help="Requests per turn that are not counted.")] = 2,
    context_len: Annotated[int, typer.Option(min=0, help="Tokens before the forwards measured here.")] = 256,
    num_repeats: Annotated[int, typer.Option(min=1, help="Forwards of each width per turn.")] = 50,
    timeout_s: Annotated[float, typer.Option(min=1, help="For one request.")] = 600.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Measure plain decoding of a running server against the least it can cost: reading its weights once.

    One request at a time with speculation off, in turns with the target's linear layers alone and its whole
    forwards of one and six rows, in this process. Run it on the server's machine, with nothing else on it.
    """
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.load.prompts import load_prompts
    from specray.bench.load.serve import Plan
    from specray.bench.plain import PLAIN, plain_table
    from specray.cli.settings import NO_DRAFT, build_config, pair_options

    options = pair_options(target=target, draft=NO_DRAFT, dtype=dtype, num_threads=num_threads)
    # Room for one sequence: the server has the memory.
    config = build_config(None, {**options, "target.max_num_seqs": 1})
    plan = Plan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        arms=[PLAIN],
        num_repeats=num_turns,
        max_tokens=max_tokens,
        num_warmup=num_warmup,
        timeout_s=timeout_s,
    )
    result = _measure(plan, config.target, context_len, num_repeats)
    Console().print(plain_table(result, title=f"{result.model} over HTTP, {target} in {dtype} here"))
    engine = {"target": target, "dtype": dtype, "num_threads": num_threads}
    write_json({**engine, **result.as_json()}, json_path)
    for failure in result.errors:
        Console(stderr=True).print(f"failed: {failure}", markup=False)
    raise typer.Exit(1 if result.errors else 0)


def _measure(plan: Plan, engine: EngineConfig, context_len: int, num_repeats: int) -> PlainResult:
    from functools import partial

    from rich.console import Console
    from rich.progress import Progress

    from specray.bench.forwards import measure_forwards
    from specray.bench.plain import ROWS, measure_plain, served_model
    from specray.engine.runner.assembly import build_runner

    # Before the checkpoint, which may take a minute to load.
    model = asyncio.run(served_model(plan.url))
    runner = build_runner(engine, role="target")
    forwards = partial(measure_forwards, runner, rows=ROWS, context_len=context_len, num_repeats=num_repeats)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("forwards", total=None)

        def show(name: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=name, completed=num_done, total=num_all)

        return asyncio.run(measure_plain(plan, model, forwards, show))
