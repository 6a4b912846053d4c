"""``specray bench soak``: a mixed load on a service whose parts fail on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.testbed.kinds import BedKind
from specray.cli import options
from specray.cli.ending import EXIT_INTERRUPTED, run_until_told

if TYPE_CHECKING:
    from specray.bench.soak.run import SoakPlan, SoakResult
    from specray.config import Config

Duration = Annotated[
    float, typer.Option(min=10, max=86_400, help="Seconds of load; it goes on until the last fault is over.")
]
Faults = Annotated[str, typer.Option(help="Kinds of faults, separated by commas; or all, none.")]
NumFaults = Annotated[int, typer.Option(min=0, max=10_000, help="Number of faults in all.")]
Testbed = Annotated[
    BedKind,
    typer.Option(help="processes: one node; cluster: two nodes; namespaces: two hosts (needs root)."),
]
Ranks = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the target.")]
Replicas = Annotated[int, typer.Option(min=1, help="Number of draft actors.")]
NumClients = Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")]
NumCases = Annotated[int, typer.Option(min=1, max=1000, help="Number of different requests.")]
CancelShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the requests that their clients cancel.")
]
Calm = Annotated[float, typer.Option(min=0, help="Seconds of load before the first fault.")]
Warmup = Annotated[
    float,
    typer.Option(
        min=0,
        help="Age of a process in seconds from which its memory is compared. If every kind of fault comes at "
        "least twice, each kind must have come once before, too.",
    ),
]
RecoveryTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds in which the service must be whole again after a fault.")
]
MaxRequests = Annotated[int, typer.Option(min=1, help="Maximum requests in all.")]
MaxGrowth = Annotated[float, typer.Option(min=0, help="Share of its memory by which a process may grow.")]
Logs = Annotated[Path | None, typer.Option(help="Directory for the logs of the service.")]


def soak(
    duration: Duration = 600.0,
    faults: Faults = "all",
    num_faults: NumFaults = 30,
    seed: options.Seed = 0,
    testbed: Testbed = BedKind.PROCESSES,
    target: options.TargetModel = None,
    draft: options.DraftModel = None,
    tensor_parallel_size: Ranks = 1,
    num_draft_replicas: Replicas = 1,
    num_clients: NumClients = 4,
    num_cases: NumCases = 24,
    cancel_share: CancelShare = 0.15,
    calm: Calm = 20.0,
    warmup: Warmup = 120.0,
    recovery_timeout: RecoveryTimeout = 60.0,
    max_requests: MaxRequests = 20_000,
    max_growth: MaxGrowth = 0.02,
    logs: Logs = None,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Hold a mixed load on a service of its own while its parts are killed, stopped and cut off.

    Every output is compared with the output of a run without faults and without speculation. Exits with 1
    if a request failed that no Router's death excuses, a token was wrong, a block was not freed, a process
    grew, or the service did not recover.
    """
    from specray.bench.soak.run import SoakPlan
    from specray.bench.soak.schedule import parse_faults
    from specray.cli.output import make_directory

    kinds = () if faults == "none" else parse_faults(faults, testbed)
    if logs is not None:
        make_directory(logs, "--logs")
    plan = SoakPlan(
        bed=testbed,
        config=_config(target, draft, tensor_parallel_size, num_draft_replicas, num_clients, settings or []),
        kinds=kinds,
        duration_s=duration,
        num_faults=num_faults,
        seed=seed,
        num_clients=num_clients,
        num_cases=num_cases,
        cancel_share=cancel_share,
        calm_s=calm,
        warmup_s=warmup,
        max_requests=max_requests,
        recovery_timeout_s=recovery_timeout,
        directory=logs,
    )
    raise typer.Exit(_report(_run(plan), max_growth, json_path))


def _config(
    target: str | None,
    draft: str | None,
    tensor_parallel_size: int,
    num_draft_replicas: int,
    num_clients: int,
    settings: list[str],
) -> Config:
    from specray.cli.settings import build_config, pair_options

    values = pair_options(
        target=target, draft=draft, dtype="float32", max_model_len=512, num_threads=1,
        num_speculative_tokens="4", overlap="auto",
    ) | {
        "target.tensor_parallel_size": tensor_parallel_size,
        "draft.num_replicas": num_draft_replicas,
        # Caches that the load fills in its first minute; until then memory grows.
        "target.max_num_seqs": 2 * num_clients,
        "draft.max_num_seqs": 2 * num_clients,
        "router.round_timeout_s": 2.0,
        "router.verify_timeout_s": 5.0,
        "router.start_timeout_s": 120.0,
    }  # fmt: skip
    return build_config(None, values, settings)


def _run(plan: SoakPlan) -> SoakResult:
    from rich.console import Console

    from specray.bench.soak.run import soak as run_soak

    console = Console(stderr=True)

    def show(text: str) -> None:
        console.print(f"soak: {text}", markup=False, highlight=False)

    return run_until_told(run_soak(plan, show))


def _report(result: SoakResult, max_growth: float, json_path: Path | None) -> int:
    from specray.bench.soak.report import problems, soak_json, soak_tables
    from specray.cli.output import wide_console, write_json

    console = wide_console()
    console.print(soak_tables(result))
    write_json(soak_json(result, max_growth=max_growth), json_path)
    if result.is_interrupted:
        seen = f"{len(result.faults)} of {result.plan.num_faults} faults in {result.duration_s:.0f} s"
        console.print(f"interrupted after {seen}", highlight=False)
    found = problems(result, max_growth=max_growth)
    for problem in found:
        console.print(f"not held: {problem}", markup=False, highlight=False)
    if not found:
        console.print("all held", highlight=False)
    return 1 if found else EXIT_INTERRUPTED if result.is_interrupted else 0
