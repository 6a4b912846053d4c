"""``specray bench soak``: a mixed load on a service whose parts fail on a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.soak.plan import SoakPlan
from specray.cli import options
from specray.cli.ending import EXIT_INTERRUPTED, run_until_told

if TYPE_CHECKING:
    from specray.bench.soak.run import SoakResult

Ranks = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the target.")]
Replicas = Annotated[int, typer.Option(min=1, help="Number of draft actors.")]


@options.flattened
def soak(
    plan: SoakPlan,
    target: options.TargetModel = None,
    draft: options.DraftModel = None,
    tensor_parallel_size: Ranks = 1,
    num_draft_replicas: Replicas = 1,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Hold a mixed load on a service of its own while its parts are killed, stopped and cut off.

    Every output is compared with the output of a run without faults and without speculation. Exits with 1
    if a request failed that no Router's death excuses, a token was wrong, a block was not freed, a process
    grew, or the service did not recover.
    """
    from rich.console import Console

    from specray.bench.soak.report import soak_json
    from specray.bench.soak.run import soak as run_soak
    from specray.cli.output import make_directory, write_json
    from specray.cli.settings import build_config, pair_options

    if plan.logs is not None:
        make_directory(plan.logs, "--logs")
    values = pair_options(
        target=target, draft=draft, dtype="float32", max_model_len=512, num_threads=1,
        num_speculative_tokens="4", overlap="auto",
    ) | {
        "target.tensor_parallel_size": tensor_parallel_size,
        "draft.num_replicas": num_draft_replicas,
        # Caches that the load fills in its first minute; until then memory grows.
        "target.max_num_seqs": 2 * plan.num_clients,
        "draft.max_num_seqs": 2 * plan.num_clients,
        "router.round_timeout_s": 2.0,
        "router.verify_timeout_s": 5.0,
        "router.start_timeout_s": 120.0,
    }  # fmt: skip
    config = build_config(None, values, settings or [])
    console = Console(stderr=True)

    def show(text: str) -> None:
        console.print(f"soak: {text}", markup=False, highlight=False)

    result = run_until_told(run_soak(plan, config, show))
    code = print_result(result)
    write_json(soak_json(result), json_path)
    raise typer.Exit(code)


def print_result(result: SoakResult) -> int:
    """Prints tables and verdict; returns the exit code."""
    from specray.bench.soak.report import problems, soak_tables
    from specray.cli.output import wide_console

    console = wide_console()
    console.print(soak_tables(result))
    if result.is_interrupted:
        seen = f"{len(result.faults)} of {result.plan.num_faults} faults in {result.duration_s:.0f} s"
        console.print(f"interrupted after {seen}", highlight=False)
    found = problems(result)
    for problem in found:
        console.print(f"not held: {problem}", markup=False, highlight=False)
    if not found:
        console.print("all held", highlight=False)
    return 1 if found else EXIT_INTERRUPTED if result.is_interrupted else 0
