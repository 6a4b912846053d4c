"""``specray bench overload``: a running server under more load than it can serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.plans import OverloadPlan
from specray.cli import options

Output = Annotated[Path | None, typer.Option("--output", "--json", help="File for the results (JSON).")]


@options.flattened
def overload(plan: OverloadPlan, output: Output = None) -> None:
    """Measure a running server at ten times its capacity: who is served, and who is refused.

    The capacity is measured first, in a closed loop; then requests arrive at a multiple of that rate,
    whatever the server answers. Run it on another machine than the server's, if you can: the load takes
    cores of its own.
    """
    from rich.console import Console
    from rich.progress import Progress

    from specray.bench.load.overload import measure_overload
    from specray.bench.load.overload_report import overload_json, overload_tables
    from specray.bench.load.prompts import load_prompts
    from specray.cli.output import write_json

    prompts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("capacity", total=1.0)
        result = asyncio.run(
            measure_overload(
                plan,
                prompts,
                lambda name, share: progress.update(task, description=name, completed=share),
            )
        )
    for table in overload_tables(result):
        Console().print(table)
    write_json(overload_json(result), output)
