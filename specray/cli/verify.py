"""``specray verify``: proof that a running service writes what its target alone would."""

from __future__ import annotations

import asyncio

import typer

from specray.bench.plans import VerifyPlan
from specray.cli import options


@options.flattened
def verify(plan: VerifyPlan, json_path: options.JsonPath = None) -> None:
    """Compare a running service with itself without drafts: tokens, logprobs and sampled distributions."""
    from specray.bench.load.prompts import load_prompts
    from specray.bench.verify.report import verify_json, verify_table
    from specray.bench.verify.run import verify as run_plan
    from specray.bench.verify.tasks import load_tasks
    from specray.cli.output import counted_progress, wide_console, write_json

    prompts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    tasks = load_tasks(plan.tasks, plan.tasks_path, plan.num_tasks) if plan.tasks_path else []
    with counted_progress("verifying") as show:
        result = asyncio.run(run_plan(plan, prompts, tasks, show))
    wide_console().print(verify_table(result))
    write_json(verify_json(result), json_path)
    if result.faults:
        raise typer.Exit(1)
