"""``specray profile``: measure a pair for ``specray plan``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli.plan import NUM_PROFILE_PROMPTS
from specray.cli.serve import Setting


def profile(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="Default: the embedded pair.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The profile is written there.")] = Path("profile.json"),
    name: Annotated[str, typer.Option(help="For the tables of plan; default: the hardware.")] = "",
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, max=2, help="Of acceptance; may be repeated. Steps are measured at the first."),
    ] = None,
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts that acceptance is measured on.")
    ] = NUM_PROFILE_PROMPTS,
    num_sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences side by side; may be repeated.")
    ] = None,
    num_passes: Annotated[
        int, typer.Option(min=1, max=50, help="Over all loads; for each size the median counts.")
    ] = 3,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Measure outcomes, and both engines at work; default: unless speculation.overlap is serial.",
        ),
    ] = None,
    settings: Setting = None,
) -> None:
    """Measure what a pair's steps take and how good its draft is; `specray plan` simulates from it."""
    from rich.console import Console

    from specray.bench.capacity import NUM_SEQUENCES, SweepPlan, measure_profile
    from specray.bench.load.prompts import load_prompts
    from specray.cli.settings import build_config
    from specray.planning.profile import save_profile
    from specray.planning.report import profile_table
    from specray.types import Overlap

    config = build_config(config_path, {}, settings or [])
    has_overlap = config.speculation.overlap != Overlap.SERIAL if overlap is None else overlap
    plan = SweepPlan(
        temperatures=tuple(temperature or (0.0, 0.7, 1.0)),
        step_temperature=temperature[0] if temperature else 0.0,
        num_sequences=tuple(num_sequences or NUM_SEQUENCES),
        has_overlap=has_overlap,
        num_passes=num_passes,
        dataset=dataset.value,
    )
    prompts = load_prompts(dataset, dataset_path, num_prompts)
    with Console(stderr=True).status("starting the pair") as status:
        measured = asyncio.run(measure_profile(config, prompts, plan, name=name, progress=status.update))
    save_profile(measured, output)
    console = Console()
    console.print(profile_table(measured))
    console.print(f"profile: {output}", highlight=False)
