"""``specray advise``: which draft pays for a target, and what would change that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.cli.options import option
from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

_MAX_SEQUENCE_TOKENS = 2048
"""Most tokens of prompt and output where --max-model-len is not given; longer prompts are left out."""


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """The target, and what may draft for it."""

    target: options.TargetModel = None
    draft: list[str] | None = option(
        None,
        "Candidate: a model (path, GGUF file, hub id, known name, embedded), own (what the package "
        "brings for a known target), ngram, suffix or lookahead; MODEL@KEY=VALUE,... sets keys of "
        "`draft`, such as small@quantization=int4. May be repeated. Default: what the package brings for "
        "the target, ngram, suffix and lookahead.",
    )
    drafter: list[str] | None = option(
        None, "Candidate: directory of a drafter on the target. May be repeated."
    )
    tree: list[str] | None = option(None, "Each draft with such trees too: nodes, or children such as 4x2x1.")
    dtype: options.Dtype = None
    max_model_len: options.MaxModelLen = None
    settings: options.Settings = None


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What they are asked."""

    prompts: list[str] | None = option(
        None,
        "NAME=FILE: prompts of one domain; a prompt in each line, or JSON lines with `prompt` or "
        "`turns`. May be repeated; in place of --dataset.",
    )
    dataset: options.PromptSource = Dataset.BUILTIN
    dataset_path: options.PromptPath = None
    num_prompts: int = option(12, "Prompts of the data set, and at most of each file.", min=1)
    chat: bool = option(True, "Ask in the model's chat template, where it has one.")
    max_tokens: options.MaxTokens = 64
    temperature: options.Temperatures = None


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What is measured."""

    k: list[int] | None = option(
        None,
        "Draft tokens per round to compare; may be repeated. Default: 1 to 8 by ones.",
        min=1,
        max=MAX_SPECULATIVE_TOKENS,
    )
    concurrency: list[int] | None = option(
        None, "Requests at a time to predict for; may be repeated, the first ranks. Default: 1 8 32.", min=1
    )
    num_passes: int = option(2, "Passes over the loads that time steps.", min=1, max=50)
    seconds: float = option(120.0, "Seconds of the loads that time steps.", min=0)
    check: bool = option(
        False,
        "Serve the prompts with every draft, one at a time, and print the measured speed-up.",
        "--check",
    )

    def concurrencies(self, most: int) -> tuple[int, ...]:
        """Requests at a time, the first of which ranks. Raises ConfigError where there are too many."""
        wanted = tuple(dict.fromkeys(self.concurrency or (1, 8, 32)))
        if max(wanted) > most:
            raise ConfigError(f"--concurrency is {max(wanted)}; allowed: 1..{most} (target.max_num_seqs)")
        if self.check and 1 not in wanted:
            found = " ".join(map(str, wanted))
            raise ConfigError(f"--concurrency is {found}; allowed with --check: also 1")
        return wanted


@options.flattened
def advise(
    candidates: CandidateOptions,
    asked: PromptOptions,
    measured: MeasureOptions,
    json_path: options.JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="File for the chart (SVG).")] = None,
    config_out: Annotated[
        Path | None,
        typer.Option("--config", help="File for the configuration that serves the winner (YAML)."),
    ] = None,
    report: options.ReportPath = None,
) -> None:
    """Measure candidate drafts on one target, and rank them by predicted tokens/s, without Ray."""
    from specray.bench.advise import report as written
    from specray.bench.advise.advice import advise as ranked
    from specray.bench.advise.candidate import candidates_of
    from specray.bench.advise.check import measured_speedups
    from specray.bench.advise.measure import MeasurePlan, measure
    from specray.bench.core.report import page
    from specray.cli.advise.inputs import pairs_of, prompts_of
    from specray.cli.output import counted_progress, wide_console, write_json, write_text

    given = candidates_of(pairs_of(candidates), candidates.tree or [])
    own = given[0].config
    longest = own.target.max_model_len or _MAX_SEQUENCE_TOKENS
    prompts = prompts_of(own, asked)
    prompts = [one for one in prompts if len(one.token_ids) + asked.max_tokens <= longest]
    if not prompts:
        raise ConfigError(
            f"--max-tokens is {asked.max_tokens}; allowed: with a prompt's at most {longest} "
            "(--max-model-len)"
        )
    wanted = measured.concurrencies(own.target.max_num_seqs)
    plan = MeasurePlan(
        prompts=tuple(prompts),
        temperatures=tuple(dict.fromkeys(asked.temperature or (0.0, 1.0))),
        ks=tuple(sorted(set(measured.k or range(1, 9)))),
        concurrencies=tuple(sorted(wanted)),
        max_tokens=asked.max_tokens,
        num_passes=measured.num_passes,
        max_seconds=measured.seconds,
    )
    with counted_progress("starting the engines") as show:
        found, plain, most = asyncio.run(measure(own, given, plan, show))
        speedups = asyncio.run(measured_speedups(own, given, plan, show)) if measured.check else {}
    advice = ranked(found, plain, temperature=plan.temperatures[0], concurrencies=wanted, most_sequences=most)
    if config_out is not None:
        write_text(config_out, written.advice_config(advice, own), "--config")
    console = wide_console()
    tables = [*written.advice_tables(advice), *([written.check_table(advice, speedups)] if speedups else [])]
    for table in tables:
        console.print(table)
    if report is not None:
        write_text(report, page("Which draft pays", "specray advise", [], tables), "--report")
    write_json({**written.advice_json(advice), "measured_speedups": speedups}, json_path)
    if plot is not None:
        write_text(plot, written.advice_chart(advice), "--plot")
