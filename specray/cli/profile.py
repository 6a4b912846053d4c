"""``specray profile``: the measurement of a pair from which ``specray plan`` simulates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options

ConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.yaml]", help="Configuration of the pair; default: the embedded pair."),
]
Output = Annotated[Path, typer.Option(help="File for the profile.")]
Name = Annotated[str, typer.Option(help="Name in the tables of `specray plan`; default: the hardware.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=2,
        help="Temperature at which acceptance is measured; may be repeated. Steps are timed at the first. "
        "Default: 0 0.7 1.",
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts on which acceptance is measured.")]
HasOverlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Measure draft-ahead outcomes, and both engines at work at once; default: unless "
        "speculation.overlap is serial.",
    ),
]


def profile(
    config_path: ConfigPath = None,
    output: Output = Path("profile.json"),
    name: Name = "",
    temperature: Temperatures = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: NumPrompts = options.NUM_PROFILE_PROMPTS,
    num_sequences: options.NumSequences = None,
    num_passes: options.NumPasses = 3,
    overlap: HasOverlap = None,
    settings: options.Settings = None,
) -> None:
    """Measure how long a pair's steps take and how good its draft is, for `specray plan`."""
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
