"""``specray bench overload``: a running server at a multiple of what it can do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli.bench.output import write_json


def overload(
    url: Annotated[str, typer.Option(help="The server, http only.")] = "http://127.0.0.1:8000",
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Different ones.")] = 12,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at a time that make up its capacity.")
    ] = 64,
    warmup: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds of the same loop before, which do not count.")
    ] = 20.0,
    capacity_duration: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds at capacity, in a closed loop.")
    ] = 20.0,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests/s that are its capacity; default: as measured.")
    ] = None,
    factor: Annotated[float, typer.Option(min=0.1, max=1000, help="Arrivals, as a multiple of it.")] = 10.0,
    duration: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of overload.")] = 60.0,
    max_requests: Annotated[int, typer.Option(min=1, help="Of the overload, at most.")] = 100_000,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Requests go round among these tenants; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and requests.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="For one request.")] = 120.0,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Write the results there.")
    ] = None,
) -> None:
    """Measure what a running server does with ten times more than it can: who is served, who is refused.

    First its capacity in a closed loop, then a multiple of that rate, whatever it answers. Run it on another
    machine where there is one: the load is generated on the same cores otherwise.
    """
    from rich.console import Console
    from rich.progress import Progress

    from specray.bench.load.overload import OverloadPlan, measure_overload
    from specray.bench.load.overload_report import memory_table, overload_table
    from specray.bench.load.prompts import load_prompts

    plan = OverloadPlan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        concurrency=concurrency,
        warmup_s=warmup,
        capacity_duration_s=capacity_duration,
        rate_per_s=rate,
        factor=factor,
        duration_s=duration,
        max_requests=max_requests,
        max_tokens=max_tokens,
        temperature=temperature,
        tenants=tuple(tenant or ()),
        seed=seed,
        timeout_s=timeout_s,
    )
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("capacity", total=1.0)

        def show(name: str, share: float) -> None:
            progress.update(task, description=name, completed=share)

        result = asyncio.run(measure_overload(plan, show))
    console.print(overload_table(result))
    memory = memory_table(result)
    if memory is not None:
        console.print(memory)
    write_json(result.as_json(), output)
