"""``specray advise``: which draft pays for a target, and what would change that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="Candidate: a model (path, GGUF file, hub id, known name, embedded), own (what the package "
        "brings for a known target), ngram, suffix or lookahead; MODEL@KEY=VALUE,... sets keys of `draft`, "
        "such as small@quantization=int4. May be repeated. Default: what the package brings for the target, "
        "ngram, suffix and lookahead.",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--drafter", help="Candidate: directory of a drafter on the target. May be repeated."),
]
Trees = Annotated[
    list[str] | None,
    typer.Option("--tree", help="Each draft with such trees too: nodes, or children such as 4x2x1."),
]
PromptFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        help="NAME=FILE: prompts of one domain; a prompt in each line, or JSON lines with `prompt` or "
        "`turns`. May be repeated; in place of --dataset.",
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts of the data set, and at most of each file.")]
Ks = Annotated[
    list[int] | None,
    typer.Option(
        "--k",
        min=1,
        max=MAX_SPECULATIVE_TOKENS,
        help="Draft tokens per round to compare; may be repeated. Default: 1 to 8 by ones.",
    ),
]
Concurrencies = Annotated[
    list[int] | None,
    typer.Option(
        "--concurrency",
        min=1,
        help="Requests at a time to predict for; may be repeated, the first ranks. Default: 1 8 32.",
    ),
]
MaxSeconds = Annotated[float, typer.Option("--seconds", min=0, help="Seconds of the loads that time steps.")]
NumPasses = Annotated[int, typer.Option(min=1, max=50, help="Passes over the loads that time steps.")]
IsChat = Annotated[bool, typer.Option(help="Ask in the model's chat template, where it has one.")]
IsChecked = Annotated[
    bool,
    typer.Option(
        "--check", help="Serve the prompts with every draft, one at a time, and print the measured speed-up."
    ),
]
PlotPath = Annotated[Path | None, typer.Option("--plot", help="File for the chart (SVG).")]
ConfigOut = Annotated[
    Path | None, typer.Option("--config", help="File for the configuration that serves the winner (YAML).")
]

_MAX_SEQUENCE_TOKENS = 2048
"""Most tokens of prompt and output where --max-model-len is not given; longer prompts are left out."""


def advise(
    target: options.TargetModel = None,
    draft: Drafts = None,
    drafter: Drafters = None,
    tree: Trees = None,
    dtype: options.Dtype = None,
    prompts: PromptFiles = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: NumPrompts = 12,
    chat: IsChat = True,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperatures = None,
    k: Ks = None,
    concurrency: Concurrencies = None,
    num_passes: NumPasses = 2,
    seconds: MaxSeconds = 120.0,
    check: IsChecked = False,
    max_model_len: options.MaxModelLen = None,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
    plot: PlotPath = None,
    config_out: ConfigOut = None,
    report: options.ReportPath = None,
) -> None:
    """Measure candidate drafts on one target, and rank them by predicted tokens/s, without Ray."""
    from specray.bench.advise.advice import advise as ranked
    from specray.bench.advise.candidate import candidates_of
    from specray.bench.advise.check import measured_speedups
    from specray.bench.advise.measure import MeasurePlan, measure
    from specray.bench.advise.report import (
        advice_chart,
        advice_config,
        advice_json,
        advice_tables,
        check_table,
    )
    from specray.bench.core.report import page
    from specray.cli.advise.inputs import pairs_of, prompts_of
    from specray.cli.output import counted_progress, wide_console, write_json, write_text

    pairs = pairs_of(target, draft, drafter, dtype, max_model_len, settings or [])
    candidates = candidates_of(pairs, tree or [])
    own = candidates[0].config
    longest = own.target.max_model_len or _MAX_SEQUENCE_TOKENS
    asked = prompts_of(own, prompts, dataset, dataset_path, num_prompts, is_chat=chat)
    asked = [one for one in asked if len(one.token_ids) + max_tokens <= longest]
    if not asked:
        raise ConfigError(
            f"--max-tokens is {max_tokens}; allowed: with a prompt's at most {longest} (--max-model-len)"
        )
    wanted = tuple(dict.fromkeys(concurrency or (1, 8, 32)))
    most = own.target.max_num_seqs
    if max(wanted) > most:
        raise ConfigError(f"--concurrency is {max(wanted)}; allowed: 1..{most} (target.max_num_seqs)")
    if check and 1 not in wanted:
        raise ConfigError(f"--concurrency is {' '.join(map(str, wanted))}; allowed with --check: also 1")
    plan = MeasurePlan(
        prompts=tuple(asked),
        temperatures=tuple(dict.fromkeys(temperature or (0.0, 1.0))),
        ks=tuple(sorted(set(k or range(1, 9)))),
        concurrencies=tuple(sorted(wanted)),
        max_tokens=max_tokens,
        num_passes=num_passes,
        max_seconds=seconds,
    )
    with counted_progress("starting the engines") as show:
        measured, plain, most = asyncio.run(measure(own, candidates, plan, show))
        speedups = asyncio.run(measured_speedups(own, candidates, plan, show)) if check else {}
    advice = ranked(
        measured, plain, temperature=plan.temperatures[0], concurrencies=wanted, most_sequences=most
    )
    if config_out is not None:
        write_text(config_out, advice_config(advice, own), "--config")
    console = wide_console()
    tables = [*advice_tables(advice), *([check_table(advice, speedups)] if speedups else [])]
    for table in tables:
        console.print(table)
    if report is not None:
        write_text(report, page("Which draft pays", "specray advise", [], tables), "--report")
    write_json({**advice_json(advice), "measured_speedups": speedups}, json_path)
    if plot is not None:
        write_text(plot, advice_chart(advice), "--plot")
