"""``specray verify``: proof that a running service writes what its target alone would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.verify.tasks import TaskKind
from specray.cli import options
from specray.cli.options import option


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What is compared."""

    url: options.ServerUrl = options.DEFAULT_URL
    dataset: options.PromptSource = Dataset.BUILTIN
    dataset_path: options.PromptPath = None
    num_prompts: options.NumPrompts = 12
    max_tokens: options.MaxTokens = 48
    concurrency: options.Concurrency = 4
    seed: options.Seed = 0
    num_samples: int = option(8, "Outputs of each prompt under rejection, for each way; 0: none.", min=0)
    exact: bool = option(False, "Take one other token for a fault: for a service in float32.", "--exact")
    tasks: TaskKind = option(TaskKind.HUMANEVAL, "How the tasks of --tasks-path are scored.")
    tasks_path: Path | None = option(
        None, "Tasks to solve with and without drafts; humaneval runs what the model writes.", dir_okay=False
    )
    num_tasks: int = option(40, "Tasks, the first of the file.", min=1)
    timeout_s: options.RequestTimeout = 600.0


@options.flattened
def verify(given: VerifyOptions, json_path: options.JsonPath = None) -> None:
    """Compare a running service with itself without drafts: tokens, logprobs and sampled distributions."""
    from specray.bench.load.prompts import load_prompts
    from specray.bench.verify.plan import VerifyPlan
    from specray.bench.verify.report import verify_json, verify_table
    from specray.bench.verify.run import verify as run_plan
    from specray.bench.verify.tasks import load_tasks
    from specray.cli.output import counted_progress, wide_console, write_json

    tasks = () if given.tasks_path is None else load_tasks(given.tasks, given.tasks_path, given.num_tasks)
    plan = VerifyPlan(
        url=given.url,
        prompts=load_prompts(given.dataset, given.dataset_path, given.num_prompts),
        max_tokens=given.max_tokens,
        concurrency=given.concurrency,
        seed=given.seed,
        is_exact=given.exact,
        num_samples=given.num_samples,
        tasks=tasks,
        timeout_s=given.timeout_s,
    )
    with counted_progress("verifying") as show:
        result = asyncio.run(run_plan(plan, show))
    wide_console().print(verify_table(result))
    write_json(verify_json(result), json_path)
    if result.faults:
        raise typer.Exit(1)
