"""``specray bench compare``: specray and other inference servers over the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specray.bench.compare.plan import ComparePlan
from specray.cli import options
from specray.cli.ending import run_until_told

Out = Annotated[Path, typer.Option(help="Directory for the report; a run that is there is continued.")]


@options.flattened
def compare(out: Out, plan: ComparePlan) -> None:
    """Compare specray with the other inference servers that are installed, over the same prompts.

    In every turn the server of each arm is started, measured and stopped, one after another.
    """
    from dataclasses import replace

    from rich.console import Console

    from specray.bench.compare.journal import Journal
    from specray.bench.compare.report import CompareReport, markdown, write_report
    from specray.bench.compare.run import compare as measure
    from specray.bench.compare.run import conditions_of, prepared, systems_of
    from specray.bench.load.prompts import load_prompts
    from specray.cli.models.checkpoints import local_checkpoint
    from specray.cli.output import make_directory

    plan = replace(plan, target=local_checkpoint(plan.target), draft=local_checkpoint(plan.draft))
    console, systems = Console(stderr=True), systems_of(plan)
    num_prompts = max(plan.num_prompts, plan.num_warmup, *plan.concurrencies)
    prompts = load_prompts(plan.dataset, plan.dataset_path, num_prompts)
    run = prepared(plan, systems, out)
    conditions = conditions_of(plan, run.setup)
    make_directory(out, "--out")
    journal = Journal(out / "passes.jsonl", conditions)
    run.convert()
    outcome = run_until_told(measure(plan, run, prompts, journal, on_progress=console.print))
    report = CompareReport(
        "specray and its peers", journal.conditions, journal.rows, run.absent, outcome.failed
    )
    write_report(report, out)
    print(markdown(report))
    if not outcome.is_complete:
        console.print("the time limit is over: run the same command again to go on")
    raise typer.Exit(1 if outcome.failed else 0)
