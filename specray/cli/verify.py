"""``specray verify``: proof that a running service writes what its target alone would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.verify.tasks import TaskKind
from specray.cli import options

Exact = Annotated[
    bool, typer.Option("--exact", help="Take one other token for a fault: for a service in float32.")
]
NumSamples = Annotated[
    int, typer.Option(min=0, help="Outputs of each prompt under rejection, for each way; 0: none.")
]

Tasks = Annotated[TaskKind, typer.Option(help="How the tasks of --tasks-path are scored.")]
TasksPath = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, help="Tasks to solve with and without drafts; humaneval runs what the model writes."
    ),
]
NumTasks = Annotated[int, typer.Option(min=1, help="Tasks, the first of the file.")]


def verify(
    url: options.ServerUrl = options.DEFAULT_URL,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: options.NumPrompts = 12,
    max_tokens: options.MaxTokens = 48,
    concurrency: options.Concurrency = 4,
    seed: options.Seed = 0,
    num_samples: NumSamples = 8,
    exact: Exact = False,
    tasks: Tasks = TaskKind.HUMANEVAL,
    tasks_path: TasksPath = None,
    num_tasks: NumTasks = 40,
    timeout_s: options.RequestTimeout = 600.0,
    json_path: options.JsonPath = None,
) -> None:
    """Compare a running service with itself without drafts: tokens, logprobs and sampled distributions."""
    from specray.bench.load.prompts import load_prompts
    from specray.bench.verify.plan import VerifyPlan
    from specray.bench.verify.report import verify_json, verify_table
    from specray.bench.verify.run import verify as run_plan
    from specray.bench.verify.tasks import load_tasks
    from specray.cli.output import counted_progress, wide_console, write_json

    plan = VerifyPlan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        max_tokens=max_tokens,
        concurrency=concurrency,
        seed=seed,
        is_exact=exact,
        num_samples=num_samples,
        tasks=() if tasks_path is None else load_tasks(tasks, tasks_path, num_tasks),
        timeout_s=timeout_s,
    )
    with counted_progress("verifying") as show:
        result = asyncio.run(run_plan(plan, show))
    wide_console().print(verify_table(result))
    write_json(verify_json(result), json_path)
    if result.faults:
        raise typer.Exit(1)
