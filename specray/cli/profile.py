"""``specray profile``: the measurement of a pair from which ``specray plan`` simulates."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.cli.options import option


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is measured."""

    temperature: list[float] | None = option(
        None,
        "Temperature at which acceptance is measured; may be repeated. Steps are timed at the first. "
        "Default: 0 0.7 1.",
        min=0,
        max=2,
    )
    dataset: options.PromptSource = Dataset.BUILTIN
    dataset_path: options.PromptPath = None
    num_prompts: int = option(options.NUM_PROFILE_PROMPTS, "Prompts on which acceptance is measured.", min=1)
    num_sequences: options.NumSequences = None
    num_passes: int = option(3, "Passes over all loads; for each size the median counts.", min=1, max=50)
    overlap: bool | None = option(
        None,
        "Measure draft-ahead outcomes, and both engines at work at once; default: unless "
        "speculation.overlap is serial.",
        "--overlap/--no-overlap",
    )


@options.flattened
def profile(
    given: ProfileOptions,
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]", help="Configuration of the pair; default: the embedded pair."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.json"),
    name: Annotated[
        str, typer.Option(help="Name in the tables of `specray plan`; default: the hardware.")
    ] = "",
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
    is_serial = config.speculation.overlap == Overlap.SERIAL
    temperatures = given.temperature
    plan = SweepPlan(
        temperatures=tuple(temperatures or (0.0, 0.7, 1.0)),
        step_temperature=temperatures[0] if temperatures else 0.0,
        num_sequences=tuple(given.num_sequences or NUM_SEQUENCES),
        has_overlap=not is_serial if given.overlap is None else given.overlap,
        num_passes=given.num_passes,
        dataset=given.dataset.value,
    )
    prompts = load_prompts(given.dataset, given.dataset_path, given.num_prompts)
    with Console(stderr=True).status("starting the pair") as status:
        measured = asyncio.run(measure_profile(config, prompts, plan, name=name, progress=status.update))
    save_profile(measured, output)
    console = Console()
    console.print(profile_table(measured))
    console.print(f"profile: {output}", highlight=False)
