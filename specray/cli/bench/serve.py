"""``specray bench serve``: a running server measured over HTTP, with speculation off and on in turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.types import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from specray.bench.load.serve import ServePlan, ServeResult

NumRepeats = Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")]
NumWarmup = Annotated[int, typer.Option(min=0, help="Requests per arm that are not counted.")]
FixedK = Annotated[
    list[int] | None,
    typer.Option(min=0, max=MAX_SPECULATIVE_TOKENS, help="Adds an arm with this K; may be repeated."),
]
IgnoreEos = Annotated[bool, typer.Option(help="Let every output have max-tokens tokens.")]
Stream = Annotated[bool, typer.Option(help="Stream the outputs; without, TTFT and ITL are not measured.")]
Chat = Annotated[bool, typer.Option(help="Send each prompt as a user's message of a chat.")]
FreshPrompts = Annotated[
    bool, typer.Option(help="Give every arm and pass a part of the prefix cache of its own.")
]


def serve(
    url: options.ServerUrl = options.DEFAULT_URL,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: options.NumPrompts = 12,
    num_repeats: NumRepeats = 2,
    max_tokens: options.MaxTokens = 128,
    concurrency: options.Concurrency = 1,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    num_warmup: NumWarmup = 2,
    num_speculative_tokens: FixedK = None,
    ignore_eos: IgnoreEos = True,
    stream: Stream = True,
    fresh_prompts: FreshPrompts = True,
    chat: Chat = False,
    timeout_s: options.RequestTimeout = 600.0,
    json_path: options.JsonPath = None,
) -> None:
    """Measure a running server over HTTP, with speculation off and on in turns."""
    from rich.console import Console

    from specray.bench.load.prompts import load_labelled_prompts
    from specray.bench.load.serve import ServePlan, default_arms
    from specray.bench.report.table import category_table, serve_table
    from specray.cli.output import report_failures, write_json

    prompts = load_labelled_prompts(dataset, dataset_path, num_prompts)
    plan = ServePlan(
        url=url,
        prompts=[prompt.text for prompt in prompts],
        categories=[prompt.category for prompt in prompts],
        arms=default_arms(num_speculative_tokens or ()),
        num_repeats=num_repeats,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        is_stream=stream,
        num_warmup=num_warmup,
        has_fresh_prompts=fresh_prompts,
        is_chat=chat,
        timeout_s=timeout_s,
    )
    result = _measure(plan)
    Console().print(serve_table(result))
    if result.arms[0].categories:
        Console().print(category_table(result))
    write_json(result.as_json(), json_path)
    raise typer.Exit(report_failures([text for arm in result.arms for text in arm.errors]))


def _measure(plan: ServePlan) -> ServeResult:
    from specray.bench.load.serve import measure
    from specray.cli.output import counted_progress

    with counted_progress("warm-up") as show:
        return asyncio.run(measure(plan, lambda name, done, of: show(f"speculation {name}", done, of)))
