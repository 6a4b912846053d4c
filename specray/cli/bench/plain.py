"""``specray bench plain``: plain decoding over HTTP against reading the target's weights once per token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options

if TYPE_CHECKING:
    from specray.bench.load.serve import ServePlan
    from specray.bench.plain import PlainResult
    from specray.config import EngineConfig

ServedTarget = Annotated[
    str, typer.Option(help="Checkpoint of the server's target: path, hub id, or embedded.")
]
ServedDtype = Annotated[str, typer.Option(help="Number format of the server's target: bfloat16 or float32.")]
ServedThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the server's target; default: by cores and model size.")
]
NumTurns = Annotated[int, typer.Option(min=1, help="Turns of forwards here and prompts there.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Output tokens per prompt.")]
NumWarmup = Annotated[int, typer.Option(min=0, help="Requests per turn that are not counted.")]
ContextLen = Annotated[int, typer.Option(min=0, help="Tokens in the KV cache before each forward.")]
NumRepeats = Annotated[int, typer.Option(min=1, help="Forwards per width and turn.")]


def plain(
    url: options.ServerUrl = options.DEFAULT_URL,
    target: ServedTarget = "embedded",
    dtype: ServedDtype = "bfloat16",
    num_threads: ServedThreads = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: options.NumPrompts = 12,
    num_turns: NumTurns = 3,
    max_tokens: MaxTokens = 128,
    num_warmup: NumWarmup = 2,
    context_len: ContextLen = 256,
    num_repeats: NumRepeats = 50,
    timeout_s: options.RequestTimeout = 600.0,
    json_path: options.JsonPath = None,
) -> None:
    """Measure plain decoding of a running server against the least it can cost: reading its weights once.

    Sends one request at a time with speculation off, in turns with forwards of the same target in this
    process: its linear layers alone, and whole forwards of one and six rows. Run it on the server's machine,
    with nothing else on it.
    """
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.load.prompts import load_prompts
    from specray.bench.load.serve import ServePlan
    from specray.bench.plain import PLAIN, plain_table
    from specray.cli.output import report_failures, write_json
    from specray.cli.settings import NO_DRAFT, build_config, pair_options

    values = pair_options(target=target, draft=NO_DRAFT, dtype=dtype, num_threads=num_threads)
    # One sequence only: the server holds the memory.
    config = build_config(None, {**values, "target.max_num_seqs": 1})
    plan = ServePlan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        arms=[PLAIN],
        num_repeats=num_turns,
        max_tokens=max_tokens,
        num_warmup=num_warmup,
        timeout_s=timeout_s,
    )
    result = _measure(plan, config.target, context_len, num_repeats)
    Console().print(plain_table(result, title=f"{result.model} over HTTP, {target} in {dtype} here"))
    engine = {"target": target, "dtype": dtype, "num_threads": num_threads}
    write_json({**engine, **result.as_json()}, json_path)
    raise typer.Exit(report_failures(result.errors))


def _measure(plan: ServePlan, engine: EngineConfig, context_len: int, num_repeats: int) -> PlainResult:
    from functools import partial

    from specray.bench.forwards import measure_forwards
    from specray.bench.plain import ROWS, measure_plain, served_model
    from specray.cli.output import counted_progress
    from specray.engine.runner.assembly import build_runner

    # Asked before the checkpoint is loaded, which may take a minute.
    model = asyncio.run(served_model(plan.url))
    runner = build_runner(engine, role="target")
    forwards = partial(measure_forwards, runner, rows=ROWS, context_len=context_len, num_repeats=num_repeats)
    with counted_progress("forwards") as show:
        return asyncio.run(measure_plain(plan, model, forwards, show))
