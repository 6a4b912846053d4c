"""``specray bench methods`` and ``prediction``: what drafts for a target, what predictions bring."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.plans import MethodsPlan, PredictionPlan
from specray.cli import options
from specray.errors import ConfigError

Pard = Annotated[str | None, typer.Option(help="Draft model with mask tokens (pard_token), for pard.")]
SvgPath = Annotated[
    Path | None, typer.Option("--svg", help="File for the chart of acceptance by depth (SVG).")
]


@options.flattened
def methods(
    plan: MethodsPlan,
    target: options.TargetModel = None,
    draft: options.Draft = None,
    drafter: options.Drafter = None,
    pard: Pard = None,
    dtype: options.Dtype = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    max_model_len: options.MaxModelLen = 2048,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
    svg: SvgPath = None,
    report: options.ReportPath = None,
) -> None:
    """Measure every method of drafting for one target in turns, without Ray."""
    from rich.console import Console

    from specray.bench.core.report import values_of
    from specray.bench.methods.drafts import drafts_of, methods_of
    from specray.bench.methods.prompts import methods_prompts
    from specray.bench.methods.report import methods_chart, methods_page, methods_tables
    from specray.bench.methods.run import run_plan
    from specray.cli.output import wide_console, write_json, write_text
    from specray.cli.settings import build_config, pair_options

    values = pair_options(
        target=target,
        draft=draft,
        drafter=drafter,
        dtype=dtype,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
    )
    parsed = methods_of(plan, pard, drafter)
    config, others = drafts_of(build_config(None, values, settings or []), parsed, pard)
    if plan.only_acceptance and not isinstance(config.speculation.num_speculative_tokens, int):
        raise ConfigError("--num-speculative-tokens is auto; allowed with --only-acceptance: a number")
    prompts = methods_prompts(config, plan)
    with Console(stderr=True).status("starting the pair") as status:
        rows = asyncio.run(run_plan(config, plan, parsed, prompts, others, status.update))
    console = wide_console()
    for table in methods_tables(rows):
        console.print(table)
    write_json([values_of(row) for row in rows], json_path)
    if svg is not None:
        write_text(svg, methods_chart(rows), "--svg")
    if report is not None:
        write_text(report, methods_page(rows, chart=svg.name if svg is not None else None), "--report")


@options.flattened
def prediction(
    plan: PredictionPlan,
    target: options.TargetModel = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = 1024,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the target's own outputs as predictions, as they are and edited, without Ray."""
    from rich.console import Console

    from specray.bench.prediction import measure_prediction
    from specray.cli.output import print_rows
    from specray.cli.settings import build_config, pair_options

    values = pair_options(target=target, draft=draft, dtype=dtype, max_model_len=max_model_len)
    config = build_config(None, values, settings or [])
    with Console(stderr=True).status("starting the pair") as status:
        rows = asyncio.run(measure_prediction(config, plan, status.update))
    print_rows("prediction", rows, json_path)
