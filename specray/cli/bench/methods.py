"""``specray bench methods``: everything that can draft for a target, by category of prompts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.methods.method import DEFAULT_METHODS
from specray.cli import options
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.methods.method import Method
    from specray.bench.methods.prompts import LabelledPrompt
    from specray.config import Config

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="plain, lookahead, cascade (the draft model with draft.draft, ngram if it has none), pard; "
        "model, features, ngram or suffix, also with a tree, such as model:auto, model:4x2x1, ngram:16; may "
        f"be repeated. Default: {', '.join(DEFAULT_METHODS)}, pard with --pard, and features and features:16 "
        "with --drafter."
    ),
]
Pard = Annotated[
    str | None, typer.Option("--pard", help="Draft model with mask tokens (pard_token), for pard.")
]
NumRepeats = Annotated[
    int, typer.Option(min=1, help="Turns, in each of which every method is asked for all outputs.")
]
IsChat = Annotated[
    bool, typer.Option(help="Ask in the model's chat template, where it has one, or for a continuation.")
]
OnlyAcceptance = Annotated[
    bool,
    typer.Option(
        "--only-acceptance",
        help="Let the target write the outputs alone, and lead each method along them: no speeds, and K set.",
    ),
]
ContextPath = Annotated[
    Path | None,
    typer.Option("--context", help="Text file, of which a piece of its own goes before each prompt."),
]
ContextTokens = Annotated[int, typer.Option(min=1, help="Tokens of each piece of --context.")]
SvgPath = Annotated[
    Path | None, typer.Option("--svg", help="File for the chart of acceptance by depth (SVG).")
]

_MAX_SEQUENCE_TOKENS = 2048
"""Most tokens of prompt and output where neither the option nor the configuration says."""


def methods(
    target: options.TargetModel = None,
    draft: options.Draft = None,
    drafter: options.Drafter = None,
    pard: Pard = None,
    dtype: options.Dtype = None,
    method: Methods = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: options.NumPrompts = 13,
    context: ContextPath = None,
    context_tokens: ContextTokens = 4096,
    chat: IsChat = True,
    only_acceptance: OnlyAcceptance = False,
    temperature: options.Temperatures = None,
    num_repeats: NumRepeats = 3,
    max_tokens: options.MaxTokens = 128,
    max_model_len: options.MaxModelLen = 2048,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
    svg: SvgPath = None,
    report: options.ReportPath = None,
) -> None:
    """Measure every method of drafting for one target in turns, without Ray."""
    from rich.console import Console

    from specray.bench.methods.drafts import drafts_of
    from specray.bench.methods.run import measure_acceptance, measure_methods
    from specray.bench.report.methods import methods_chart, methods_page, methods_tables
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
    parsed = _methods_of(method, pard, drafter)
    config, other_drafts = drafts_of(build_config(None, values, settings or []), parsed, pard)
    k = config.speculation.num_speculative_tokens
    if only_acceptance and not isinstance(k, int):
        raise ConfigError("--num-speculative-tokens is auto; allowed with --only-acceptance: a number")
    prompts = _prompts_of(
        config,
        dataset,
        dataset_path,
        num_prompts,
        context,
        context_tokens,
        is_chat=chat,
        max_tokens=max_tokens,
    )
    with Console(stderr=True).status("starting the pair") as status:
        measure = (
            partial(measure_acceptance, num_draft_steps=int(k))
            if only_acceptance
            else partial(measure_methods, num_repeats=num_repeats)
        )
        rows = asyncio.run(
            measure(
                config,
                parsed,
                prompts,
                temperatures=temperature or (0.0, 1.0),
                max_tokens=max_tokens,
                on_progress=status.update,
                other_drafts=other_drafts,
            )
        )
    console = wide_console()
    for table in methods_tables(rows):
        console.print(table)
    write_json([asdict(row) for row in rows], json_path)
    if svg is not None:
        write_text(svg, methods_chart(rows), "--svg")
    if report is not None:
        write_text(report, methods_page(rows, chart=svg.name if svg is not None else None), "--report")


def _methods_of(names: list[str] | None, pard: str | None, drafter: str | None) -> list[Method]:
    """What is compared, plain decoding first."""
    from specray.bench.methods.method import PARD, Method
    from specray.bench.methods.run import with_plain

    default = (
        *DEFAULT_METHODS,
        *([PARD] if pard else []),
        *(["features", "features:16"] if drafter else []),
    )
    return with_plain([Method.parse(name) for name in names or default])


def _prompts_of(
    config: Config,
    dataset: Dataset,
    path: Path | None,
    num_prompts: int,
    context: Path | None,
    context_tokens: int,
    *,
    is_chat: bool,
    max_tokens: int,
) -> list[LabelledPrompt]:
    """The prompts behind which an output has room, each behind its piece of ``context``."""
    from specray.bench.load.contexts import contexts
    from specray.bench.load.prompts import load_labelled_prompts
    from specray.bench.methods.prompts import tokenized
    from specray.tokenization import load_tokenizer

    tokenizer = load_tokenizer(config.target.model)
    loaded = load_labelled_prompts(dataset, path, num_prompts)
    if context is not None:
        pieces = contexts(context, tokenizer, num_tokens=context_tokens, count=len(loaded))
        loaded = [
            replace(prompt, text=f"{piece}\n\n{prompt.text}")
            for piece, prompt in zip(pieces, loaded, strict=True)
        ]
    longest = (config.target.max_model_len or _MAX_SEQUENCE_TOKENS) - max_tokens
    return [one for one in tokenized(tokenizer, loaded, is_chat=is_chat) if len(one.token_ids) <= longest]
