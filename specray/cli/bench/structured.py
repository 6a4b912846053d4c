"""``specray bench structured``: JSON by many schemas, with speculation off and on, and hostile grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.cli import options

if TYPE_CHECKING:
    from specray.bench.structured.hostile import HostileResult
    from specray.bench.structured.run import StructuredPlan, StructuredResult

NumSchemas = Annotated[int, typer.Option(min=0, help="Number of schemas, composed by the seed; 0: none.")]
Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", help="Adds an arm beside off: on or n-grams; default: both. May be repeated."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens of an answer, at most.")]
Hostile = Annotated[bool, typer.Option(help="Also measure hostile grammars beside ordinary requests.")]
NumOthers = Annotated[int, typer.Option(min=1, help="Ordinary requests at a time beside hostile grammars.")]
AttackTime = Annotated[float, typer.Option(min=0.1, help="Seconds of each hostile grammar.")]
Attacks = Annotated[
    list[str] | None,
    typer.Option("--attack", help="Hostile grammar by its name in the report; default: all."),
]
AttackPause = Annotated[
    float, typer.Option(min=0, help="Seconds between an answer and the next hostile grammar; 0: a flood.")
]
QuietTime = Annotated[
    float, typer.Option(min=0.1, help="Seconds of ordinary requests alone before each of them.")
]
ReportPath = Annotated[Path | None, typer.Option(help="File for the report (Markdown); default: stdout.")]


def structured(
    url: options.ServerUrl = options.DEFAULT_URL,
    num_schemas: NumSchemas = 200,
    temperature: options.Temperatures = None,
    arm: Arms = None,
    max_tokens: MaxTokens = 96,
    concurrency: options.Concurrency = 1,
    seed: options.Seed = 0,
    hostile: Hostile = False,
    num_others: NumOthers = 2,
    attack: Attacks = None,
    attack_s: AttackTime = 5.0,
    attack_pause_s: AttackPause = 0.25,
    quiet_s: QuietTime = 5.0,
    timeout_s: options.RequestTimeout = 120.0,
    report: ReportPath = None,
) -> None:
    """Ask a running chat model for JSON by many schemas: is it valid, equal under speculation, and how fast?

    With --hostile, grammars that ask for endless work are sent beside ordinary requests: how long does an
    answer take, and what do the others notice?
    """
    from specray.bench.core.provenance import provenance
    from specray.bench.structured.hostile import attacks
    from specray.bench.structured.judgement import shortfalls
    from specray.bench.structured.report import structured_report
    from specray.bench.structured.run import OFF, SPECULATIVE, StructuredPlan
    from specray.bench.structured.schemas import compose
    from specray.cli.output import report_failures, write_text
    from specray.errors import ConfigError

    arms = arm or list(SPECULATIVE)
    for name in arms:
        if name not in SPECULATIVE:
            raise ConfigError(f"--arm is {name!r}; allowed: {' or '.join(SPECULATIVE)}")
    names = [each.name for each in attacks()]
    for name in attack or ():
        if name not in names:
            raise ConfigError(f"--attack is {name!r}; allowed: {', '.join(names)}")
    plan = StructuredPlan(
        url=url,
        cases=compose(num_schemas, seed),
        arms=(OFF, *arms),
        temperatures=tuple(temperature or (0.0, 1.0)),
        max_tokens=max_tokens,
        concurrency=concurrency,
        seed=seed,
        timeout_s=timeout_s,
    )
    conditions = list(provenance())  # The sources may be changed while it runs.
    result = _measure(plan) if plan.cases else None
    attacked = _attack(plan, num_others, quiet_s, attack_s, attack_pause_s, attack or ()) if hostile else None
    text = structured_report(conditions, result, attacked)
    if report is None:
        typer.echo(text)
    else:
        write_text(report, text, "--report")
    found = [*(shortfalls(result) if result else ()), *(attacked.shortfalls if attacked else ())]
    raise typer.Exit(report_failures(found))


def _measure(plan: StructuredPlan) -> StructuredResult:
    from specray.bench.structured.run import measure_structured
    from specray.cli.output import counted_progress

    with counted_progress("schemas") as show:
        return asyncio.run(measure_structured(plan, show))


def _attack(
    plan: StructuredPlan,
    num_others: int,
    quiet_s: float,
    attack_s: float,
    pause_s: float,
    names: Sequence[str],
) -> HostileResult:
    from specray.bench.load.prompts import Dataset, load_prompts
    from specray.bench.structured.hostile import measure_hostile
    from specray.cli.output import counted_progress

    with counted_progress("an ordinary schema") as show:
        return asyncio.run(
            measure_hostile(
                plan.url,
                prompts=load_prompts(Dataset.BUILTIN, None, 12),
                num_others=num_others,
                quiet_s=quiet_s,
                attack_s=attack_s,
                timeout_s=plan.timeout_s,
                on_progress=show,
                names=names,
                pause_s=pause_s,
            )
        )
