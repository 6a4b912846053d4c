"""``specray bench structured``: JSON by many schemas, with speculation off and on, and hostile grammars."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.plans import StructuredPlan
from specray.cli import options

ReportPath = Annotated[Path | None, typer.Option(help="File for the report (Markdown); default: stdout.")]


@options.flattened
def structured(plan: StructuredPlan, report: ReportPath = None) -> None:
    """Ask a running chat model for JSON by many schemas: is it valid, equal under speculation, and how fast?

    With --hostile, grammars that ask for endless work are sent next to ordinary requests: how long does an
    answer take, and what do the others notice?
    """
    from specray.bench.core.provenance import provenance
    from specray.bench.load.prompts import Dataset, load_prompts
    from specray.bench.structured.hostile import attacks, measure_hostile
    from specray.bench.structured.judgement import shortfalls
    from specray.bench.structured.report import structured_report
    from specray.bench.structured.run import SPECULATIVE, measure_structured
    from specray.bench.structured.schemas import compose
    from specray.cli.output import counted_progress, report_failures, write_text
    from specray.errors import ConfigError

    names = [each.name for each in attacks()]
    for option, given, allowed in (("arm", plan.arm, SPECULATIVE), ("attack", plan.attack, names)):
        for name in given or ():
            if name not in allowed:
                raise ConfigError(f"--{option} is {name!r}; allowed: {', '.join(allowed)}")
    conditions = list(provenance())  # The sources may be changed while it runs.
    result = attacked = None
    if plan.num_schemas:
        with counted_progress("schemas") as show:
            result = asyncio.run(measure_structured(plan, compose(plan.num_schemas, plan.seed), show))
    if plan.hostile:
        with counted_progress("an ordinary schema") as show:
            attacked = asyncio.run(measure_hostile(plan, load_prompts(Dataset.BUILTIN, None, 12), show))
    text = structured_report(conditions, result, attacked)
    if report is None:
        typer.echo(text)
    else:
        write_text(report, text, "--report")
    found = [*(shortfalls(result) if result else ()), *(attacked.shortfalls if attacked else ())]
    raise typer.Exit(report_failures(found))
