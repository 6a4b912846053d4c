"""``specray plan``: how many groups and drafts a load needs, by simulation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli.bench.output import write_json
from specray.cli.serve import Setting
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.plan_check import LoadRunner
    from specray.config import Config
    from specray.planning.profile import Profile
    from specray.planning.search import Demand

NUM_PROFILE_PROMPTS = 48
MAX_RATIO = 8
DEFAULT_RATIOS = "0,0.25,0.5,1"


def plan(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.yaml]", help="Its speculation and router sections count."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="From `specray profile`; may be repeated: hardware to choose from."),
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second.")] = None,
    prompt: Annotated[
        str, typer.Option(help="Prompt tokens: a number, lognormal:MEAN,P95, or @FILE with one per line.")
    ] = "512",
    output: Annotated[str, typer.Option(help="Output tokens, likewise.")] = "128",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the requests.")] = 0.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0.001, help="Time to the first token.")] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option(min=0.001, help="A request's mean time between tokens.")
    ] = None,
    slo_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Of the requests, how many must meet both.")
    ] = 0.95,
    drafts_per_group: Annotated[
        str, typer.Option(help="What is tried: numbers or fractions with commas between; 0: no draft.")
    ] = DEFAULT_RATIOS,
    max_groups: Annotated[int, typer.Option(min=1, max=4096, help="Target groups.")] = 256,
    cost: Annotated[
        list[str] | None,
        typer.Option(help="NAME=USD_PER_HOUR of one device, NAME a part of its name; may be repeated."),
    ] = None,
    network_ms: Annotated[
        float, typer.Option(min=0, help="Round trip between router and draft beyond the measured one.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    num_requests: Annotated[
        int, typer.Option(min=20, max=100_000, help="Of each simulated window, about.")
    ] = 200,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure the configured pair here and compare; without --profile, its profile too, in turns "
            "with the loads.",
        ),
    ] = False,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="With --check: clients at once; may be repeated.")
    ] = None,
    num_passes: Annotated[
        int, typer.Option(min=1, max=50, help="With --check: over all loads; the median counts.")
    ] = 3,
    dataset: Annotated[
        Dataset, typer.Option(help="With --check: where prompts come from.")
    ] = Dataset.BUILTIN,
    dataset_path: Annotated[Path | None, typer.Option(help="With --check: the data set's file.")] = None,
    settings: Setting = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Say how many target groups and drafts a load needs, from profiles, by simulation.

    The real router runs against simulated engines in virtual time. With --check the configured pair is
    started here, loaded, and held against what the first profile predicts.
    """
    from specray.cli.settings import build_config
    from specray.planning.load import OpenLoad, parse_lengths
    from specray.planning.profile import load_profile
    from specray.planning.search import Demand
    from specray.planning.simulation.results import Slo

    config = build_config(config_path, {}, settings or [])
    profiles = [load_profile(path) for path in profile or ()]
    lengths = parse_lengths(prompt, "prompt"), parse_lengths(output, "output")
    if check:
        known = profiles[0] if profiles else None
        _check(config, known, output, temperature, concurrency, num_passes, dataset, dataset_path, json_path)
        return
    if not profiles:
        raise ConfigError("--profile is missing; allowed: a file that `specray profile` wrote")
    if rate is None:
        raise ConfigError("--rate is missing; allowed: requests per second, more than 0")
    demand = Demand(
        OpenLoad(rate, *lengths, temperature),
        Slo(slo_ttft_ms, slo_itl_ms, slo_share),
        max_groups=max_groups,
        seed=seed,
        num_requests=num_requests,
    )
    _plan(config, profiles, demand, parse_ratios(drafts_per_group), cost or (), network_ms / 1e3, json_path)


def parse_ratios(text: str) -> list[Fraction]:
    """Reads ``0,0.25,1/3,2``. Raises ConfigError."""
    try:
        ratios = [Fraction(part.strip()).limit_denominator(64) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        ratios = [Fraction(-1)]
    if any(not 0 <= ratio <= MAX_RATIO for ratio in ratios):
        raise ConfigError(
            f"--drafts-per-group is {text!r}; allowed: numbers in 0..{MAX_RATIO} with commas between, such as"
            f" {DEFAULT_RATIOS} or 0,1/3"
        )
    return ratios


def _plan(
    config: Config,
    profiles: list[Profile],
    demand: Demand,
    ratios: list[Fraction],
    costs: Sequence[str],
    network_s: float,
    json_path: Path | None,
) -> None:
    from rich.console import Console

    from specray.planning.hardware import make_offers, parse_costs
    from specray.planning.report import plan_json, plan_table, recommendation
    from specray.planning.search import make_plan

    prices = parse_costs(costs)
    offers = make_offers(
        profiles,
        prices,
        temperature=demand.load.temperature,
        speculation=config.speculation,
        router_config=config.router,
        network_s=network_s,
    )
    with _routers_silent(), Console(stderr=True).status("simulating") as status:
        made = make_plan(offers, ratios, demand, progress=status.update)
    has_prices = bool(prices)
    console = Console()
    console.print(plan_table(made, has_prices=has_prices))
    console.print(recommendation(made, has_prices=has_prices), highlight=False)
    write_json(plan_json(made), json_path)


@contextmanager
def _routers_silent() -> Iterator[None]:
    """Simulated routers warn of what a fleet that is too small does to them; the table says it."""
    logger = logging.getLogger("specray.router")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check(
    config: Config,
    profile: Profile | None,
    output: str,
    temperature: float,
    concurrency: list[int] | None,
    num_passes: int,
    dataset: Dataset,
    dataset_path: Path | None,
    json_path: Path | None,
) -> None:
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.plan_check import LoadRunner, compare, measure_loads
    from specray.planning.report import check_table
    from specray.planning.simulation.fleet import Kit

    if not output.isdecimal():
        raise ConfigError(f"--output is {output!r}; allowed with --check: a number of tokens")
    if profile is not None and config.draft.has_model != (profile.draft is not None):
        raise ConfigError(
            f"the configuration has {'a' if config.draft.has_model else 'no'} draft model and the profile"
            f" {'none' if profile.draft is None else 'one'}; allowed with --check: a profile of this pair"
        )
    # Those that `specray profile` measures acceptance on.
    prompts = load_prompts(dataset, dataset_path, NUM_PROFILE_PROMPTS)
    with Console(stderr=True).status("starting the pair") as status:
        runner = LoadRunner(
            config,
            prompts,
            concurrency=concurrency or (1, 4, 8),
            max_tokens=int(output),
            temperature=temperature,
            progress=status.update,
        )
        if profile is None:
            profile = asyncio.run(
                _profile_in_turn(config, prompts, runner, temperature, num_passes, status.update)
            )
        else:
            asyncio.run(measure_loads(runner, config, num_passes=num_passes))
    kit = Kit(
        profile.target,
        profile.draft,
        profile.acceptance_at(temperature),
        profile.router,
        shares_hardware=True,
        is_replay=True,
        router_config=config.router,
        speculation=config.speculation,
    )
    rows = compare(kit, runner.measured)
    Console().print(check_table(rows, temperature=temperature))
    write_json([asdict(row) | {"error": row.error} for row in rows], json_path)


async def _profile_in_turn(
    config: Config,
    prompts: Sequence[str],
    runner: LoadRunner,
    temperature: float,
    num_passes: int,
    progress: Callable[[str], None],
) -> Profile:
    from specray.bench.capacity import SweepPlan, measure_profile
    from specray.types import Overlap

    plan = SweepPlan(
        temperatures=(temperature,),
        step_temperature=temperature,
        has_overlap=config.speculation.overlap is not Overlap.SERIAL,
        num_passes=num_passes,
    )
    return await measure_profile(config, prompts, plan, in_turn=runner.run_pass, progress=progress)
