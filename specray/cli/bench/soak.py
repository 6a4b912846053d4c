"""``specray bench soak``: a mixed load on a service of its own, which is hurt on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.testbed.kinds import BedKind
from specray.cli.bench.output import write_json
from specray.cli.ending import run_until_told
from specray.cli.serve import Setting
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.soak.run import Plan, SoakResult

_FILE_WIDTH = 120
"""Of the tables where no terminal says how wide it is."""


def soak(
    duration: Annotated[
        float,
        typer.Option(min=10, max=86_400, help="Seconds of load, and more until the last fault is over."),
    ] = 600.0,
    faults: Annotated[str, typer.Option(help="all, or kinds with commas between; none: no faults.")] = "all",
    num_faults: Annotated[int, typer.Option(min=0, max=10_000, help="Over the whole time.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the requests and of the schedule.")] = 0,
    testbed: Annotated[
        BedKind, typer.Option(help="processes: one node; cluster: two; namespaces: two hosts (needs root).")
    ] = BedKind.PROCESSES,
    target: Annotated[str | None, typer.Option(help="Target model: path or hub id.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: path or hub id.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of the target.")] = 1,
    num_draft_replicas: Annotated[int, typer.Option(min=1, help="Draft actors.")] = 1,
    num_clients: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 4,
    num_cases: Annotated[int, typer.Option(min=1, max=1000, help="Different requests.")] = 24,
    cancel_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the requests, left by their clients.")
    ] = 0.15,
    calm: Annotated[float, typer.Option(min=0, help="Seconds of load before the first fault.")] = 20.0,
    warmup: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds of a process's life before its memory is compared. Where every kind of fault comes "
            "twice or more, it is not compared before the first of each, either.",
        ),
    ] = 120.0,
    recovery_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for the service to be whole again after a fault.")
    ] = 60.0,
    max_requests: Annotated[int, typer.Option(min=1, help="No more are sent.")] = 20_000,
    max_growth: Annotated[float, typer.Option(min=0, help="Share by which no process may grow.")] = 0.02,
    logs: Annotated[Path | None, typer.Option(help="Directory for what the service prints.")] = None,
    settings: Setting = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Hold a mixed load on a service of its own while its parts are killed, stopped and cut off.

    Every output is compared with that of a run without faults and without speculation. Exits with 1 when a
    request failed for which no Router's death is an excuse, a token was wrong, a block was not freed, a
    process grew, or the service did not recover.
    """
    from specray.bench.soak.run import Plan
    from specray.bench.soak.schedule import parse_faults
    from specray.cli.settings import build_config, pair_options

    kinds = () if faults == "none" else parse_faults(faults, testbed)
    options = pair_options(
        target=target, draft=draft, dtype="float32", max_model_len=512, num_threads=1,
        num_speculative_tokens="4", overlap="auto",
    ) | {
        "target.tensor_parallel_size": tensor_parallel_size,
        "draft.num_replicas": num_draft_replicas,
        # Caches of a size that the load fills in its first minute: memory is not flat before.
        "target.max_num_seqs": 2 * num_clients,
        "draft.max_num_seqs": 2 * num_clients,
        "router.round_timeout_s": 2.0,
        "router.verify_timeout_s": 5.0,
        "router.start_timeout_s": 120.0,
    }  # fmt: skip
    if logs is not None:
        _make_directory(logs)
    plan = Plan(
        bed=testbed,
        config=build_config(None, options, settings or []),
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


def _run(plan: Plan) -> SoakResult:
    from rich.console import Console

    from specray.bench.soak.run import soak as run_soak

    console = Console(stderr=True)

    def show(text: str) -> None:
        console.print(f"soak: {text}", markup=False, highlight=False)

    return run_until_told(run_soak(plan, show))


def _report(result: SoakResult, max_growth: float, json_path: Path | None) -> int:
    from rich.console import Console

    from specray.bench.soak.report import as_json, problems, soak_tables

    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(soak_tables(result))
    write_json(as_json(result, max_growth=max_growth), json_path)
    found = problems(result, max_growth=max_growth)
    for problem in found:
        console.print(f"not held: {problem}", markup=False, highlight=False)
    if not found:
        console.print("all held", highlight=False)
    return 1 if found else 0


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {path}: {error.strerror}") from None
