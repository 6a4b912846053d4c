"""``specray bench overload``: a running server under more load than it can serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options

if TYPE_CHECKING:
    from specray.bench.load.overload import OverloadPlan, OverloadResult

HttpUrl = Annotated[str, typer.Option(help="URL of the running server, http only.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time while the capacity is measured.")]
Warmup = Annotated[float, typer.Option(min=0, max=3600, help="Seconds of load before anything counts.")]
CapacityDuration = Annotated[
    float, typer.Option(min=1, max=3600, help="Seconds for which the capacity is measured, in a closed loop.")
]
Rate = Annotated[
    float | None, typer.Option(min=0.001, help="Capacity in requests per second; default: as measured.")
]
Factor = Annotated[
    float, typer.Option(min=0.1, max=1000, help="Arrival rate, as a multiple of the capacity.")
]
Duration = Annotated[float, typer.Option(min=1, max=3600, help="Seconds of overload.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Maximum requests during the overload.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Output tokens per request.")]
Tenants = Annotated[
    list[str] | None, typer.Option(help="Tenant that sends requests, in turn with others; may be repeated.")
]
SloTtft = Annotated[
    float | None, typer.Option(min=0.001, help="Service level of some requests: ms to the first token.")
]
SloItl = Annotated[
    float | None,
    typer.Option(min=0.001, help="Service level of some requests: ms per output token after it."),
]
SloShare = Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that have the level.")]
SendSlo = Annotated[
    bool, typer.Option(help="Tell the server of the level; without, the same requests go without one.")
]
Output = Annotated[Path | None, typer.Option("--output", "--json", help="File for the results (JSON).")]


def overload(
    url: HttpUrl = options.DEFAULT_URL,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: options.NumPrompts = 12,
    concurrency: Concurrency = 64,
    warmup: Warmup = 20.0,
    capacity_duration: CapacityDuration = 20.0,
    rate: Rate = None,
    factor: Factor = 10.0,
    duration: Duration = 60.0,
    max_requests: MaxRequests = 100_000,
    max_tokens: MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    tenant: Tenants = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    slo_share: SloShare = 0.25,
    send_slo: SendSlo = True,
    seed: options.Seed = 0,
    timeout_s: options.RequestTimeout = 120.0,
    output: Output = None,
) -> None:
    """Measure a running server at ten times its capacity: who is served, and who is refused.

    The capacity is measured first, in a closed loop; then requests arrive at a multiple of that rate,
    whatever the server answers. Run it on another machine than the server's, if you can: the load takes
    cores of its own.
    """
    from rich.console import Console

    from specray.bench.load.overload import OverloadPlan
    from specray.bench.load.overload_report import class_table, memory_table, overload_table
    from specray.bench.load.prompts import load_prompts
    from specray.cli.output import write_json

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
        slo={
            name: value
            for name, value in (("ttft_ms", slo_ttft_ms), ("itl_ms", slo_itl_ms))
            if value is not None
        },
        slo_share=slo_share,
        sends_slo=send_slo,
        seed=seed,
        timeout_s=timeout_s,
    )
    result = _measure(plan)
    console = Console()
    console.print(overload_table(result))
    for table in (class_table(result), memory_table(result)):
        if table is not None:
            console.print(table)
    write_json(result.as_json(), output)


def _measure(plan: OverloadPlan) -> OverloadResult:
    from rich.console import Console
    from rich.progress import Progress

    from specray.bench.load.overload import measure_overload

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("capacity", total=1.0)

        def show(name: str, share: float) -> None:
            progress.update(task, description=name, completed=share)

        return asyncio.run(measure_overload(plan, show))
