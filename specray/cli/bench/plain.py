"""``specray bench plain``: plain decoding over HTTP against reading the target's weights once per token."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from specray.bench.plans import PlainPlan
from specray.cli import options

ServedTarget = Annotated[
    str, typer.Option(help="Checkpoint of the server's target: path, hub id, or embedded.")
]
ServedDtype = Annotated[str, typer.Option(help="Number format of the server's target: bfloat16 or float32.")]
ServedThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the server's target; default: by cores and model size.")
]


@options.flattened
def plain(
    plan: PlainPlan,
    target: ServedTarget = "embedded",
    dtype: ServedDtype = "bfloat16",
    num_threads: ServedThreads = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure plain decoding of a running server against the least it can cost: reading its weights once.

    Sends one request at a time with speculation off, in turns with forwards of the same target in this
    process: its linear layers alone, and whole forwards of one and six rows. Run it on the server's machine,
    with nothing else on it.
    """
    from functools import partial

    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import measure_forwards
    from specray.bench.load.prompts import load_prompts
    from specray.bench.plain import ROWS, measure_plain, plain_json, plain_table, served_model
    from specray.cli.output import counted_progress, report_failures, write_json
    from specray.cli.settings import NO_DRAFT, build_config, pair_options
    from specray.engine.runner.assembly import build_runner

    values = pair_options(target=target, draft=NO_DRAFT, dtype=dtype, num_threads=num_threads)
    # One sequence only: the server holds the memory.
    config = build_config(None, {**values, "target.max_num_seqs": 1})
    prompts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    # Asked before the checkpoint is loaded, which may take a minute.
    model = asyncio.run(served_model(plan.url))
    runner = build_runner(config.target, role="target")
    forwards = partial(
        measure_forwards, runner, rows=ROWS, context_len=plan.context_len, num_repeats=plan.num_repeats
    )
    with counted_progress("forwards") as show:
        result = asyncio.run(measure_plain(plan, prompts, model, forwards, show))
    Console().print(plain_table(result, title=f"{model} over HTTP, {target} in {dtype} here"))
    engine = {"target": target, "dtype": dtype, "num_threads": num_threads}
    write_json({**engine, **plain_json(result)}, json_path)
    raise typer.Exit(report_failures(result.errors))
