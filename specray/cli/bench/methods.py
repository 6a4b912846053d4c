"""``specray bench methods``: everything that can draft for a target, by category of prompts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.methods.method import DEFAULT_METHODS
from specray.cli import options
from specray.errors import ConfigError

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
) -> None:
    """Measure every method of drafting for one target in turns, without Ray."""
    from rich.console import Console

    from specray.bench.load.contexts import contexts
    from specray.bench.load.prompts import load_labelled_prompts
    from specray.bench.methods.drafts import drafts_of
    from specray.bench.methods.method import PARD, Method
    from specray.bench.methods.run import LabelledPrompt, measure_acceptance, measure_methods, with_plain
    from specray.bench.report.methods import methods_chart, methods_tables
    from specray.cli.output import wide_console, write_json, write_text
    from specray.cli.settings import build_config, pair_options
    from specray.tokenization import load_tokenizer
    from specray.tokenization.chat import ChatMessage

    values = pair_options(
        target=target,
        draft=draft,
        drafter=drafter,
        dtype=dtype,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
    )
    config = build_config(None, values, settings or [])
    names = method or (
        *DEFAULT_METHODS,
        *([PARD] if pard else []),
        *(["features", "features:16"] if drafter else []),
    )
    parsed = with_plain([Method.parse(name) for name in names])
    config, other_drafts = drafts_of(config, parsed, pard)
    tokenizer = load_tokenizer(config.target.model)
    is_chat = chat and tokenizer.chat_template is not None
    loaded = load_labelled_prompts(dataset, dataset_path, num_prompts)
    texts = [prompt.text for prompt in loaded]
    if context is not None:
        pieces = contexts(context, tokenizer, num_tokens=context_tokens, count=len(loaded))
        texts = [f"{piece}\n\n{text}" for piece, text in zip(pieces, texts, strict=True)]
    prompts = [
        LabelledPrompt(
            tokenizer.encode_chat([ChatMessage("user", text)]) if is_chat else tokenizer.encode(text),
            prompt.category,
        )
        for prompt, text in zip(loaded, texts, strict=True)
    ]
    # An output must have room for itself behind its prompt.
    longest = (max_model_len or config.target.max_model_len or 2048) - max_tokens
    prompts = [one for one in prompts if len(one.token_ids) <= longest]
    with Console(stderr=True).status("starting the pair") as status:
        temperatures = temperature or (0.0, 1.0)
        k = config.speculation.num_speculative_tokens
        if only_acceptance and not isinstance(k, int):
            raise ConfigError("--num-speculative-tokens is auto; allowed with --only-acceptance: a number")
        rows = asyncio.run(
            measure_acceptance(
                config,
                parsed,
                prompts,
                temperatures=temperatures,
                max_tokens=max_tokens,
                num_draft_steps=int(k),
                on_progress=status.update,
                other_drafts=other_drafts,
            )
            if only_acceptance
            else measure_methods(
                config,
                parsed,
                prompts,
                temperatures=temperatures,
                max_tokens=max_tokens,
                num_repeats=num_repeats,
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
