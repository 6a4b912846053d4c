"""``specray plan``: how many target groups and drafts a load needs, found by simulation."""

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
from specray.cli import options
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.plan_check import LoadRunner
    from specray.config import Config
    from specray.planning.profile import Profile
    from specray.planning.search import Demand

MAX_RATIO = 8
"""Largest number of drafts per target group that is tried."""
DEFAULT_RATIOS = "0,0.25,0.5,1"

ConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.yaml]", help="Configuration whose speculation and router are simulated."),
]
ProfilePaths = Annotated[
    list[Path] | None,
    typer.Option(help="Profile that `specray profile` wrote; repeat it to choose between kinds of hardware."),
]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Requests per second.")]
PromptLength = Annotated[
    str, typer.Option(help="Prompt tokens: a number, lognormal:MEAN,P95, or @FILE with one number per line.")
]
OutputLength = Annotated[str, typer.Option(help="Output tokens, in the same form.")]
SloTtft = Annotated[float | None, typer.Option(min=0.001, help="Target for the time to first token, in ms.")]
SloItl = Annotated[
    float | None, typer.Option(min=0.001, help="Target for a request's mean inter-token latency, in ms.")
]
SloShare = Annotated[
    float, typer.Option(min=0.01, max=1, help="Share of the requests that must meet both targets.")
]
Ratios = Annotated[
    str,
    typer.Option(help="Drafts per target group to try: numbers or fractions with commas; 0 is no draft."),
]
MaxGroups = Annotated[int, typer.Option(min=1, max=4096, help="Maximum number of target groups.")]
Costs = Annotated[
    list[str] | None,
    typer.Option(help="NAME=USD_PER_HOUR of one device; NAME is a part of its name. May be repeated."),
]
NetworkMs = Annotated[
    float, typer.Option(min=0, help="Round trip between router and draft in ms, on top of the measured one.")
]
NumRequests = Annotated[
    int, typer.Option(min=20, max=100_000, help="Approximate number of requests in a simulation.")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Start the configured pair here, load it, and compare with the prediction; without --profile, "
        "measure its profile too.",
    ),
]
Concurrencies = Annotated[
    list[int] | None, typer.Option(min=1, help="With --check: requests at a time; may be repeated.")
]
NumPasses = Annotated[
    int, typer.Option(min=1, max=50, help="With --check: passes over all loads; the median counts.")
]
PromptSource = Annotated[Dataset, typer.Option(help="With --check: source of the prompts.")]
PromptPath = Annotated[Path | None, typer.Option(help="With --check: file of the data set.")]


def plan(
    config_path: ConfigPath = None,
    profile: ProfilePaths = None,
    rate: Rate = None,
    prompt: PromptLength = "512",
    output: OutputLength = "128",
    temperature: options.Temperature = 0.0,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    slo_share: SloShare = 0.95,
    drafts_per_group: Ratios = DEFAULT_RATIOS,
    max_groups: MaxGroups = 256,
    cost: Costs = None,
    network_ms: NetworkMs = 0.0,
    seed: options.Seed = 0,
    num_requests: NumRequests = 200,
    check: Check = False,
    concurrency: Concurrencies = None,
    num_passes: NumPasses = 3,
    dataset: PromptSource = Dataset.BUILTIN,
    dataset_path: PromptPath = None,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Find how many target groups and drafts a load needs, by simulation from measured profiles.

    The real router runs against simulated engines in virtual time. With --check the configured pair is
    started here, loaded, and compared with what the first profile predicts.
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
    """Reads drafts per target group such as ``0,0.25,1/3,2``. Raises ConfigError."""
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

    from specray.cli.output import write_json
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
    """Silences the warnings of simulated routers: a fleet that is too small shows in the table."""
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
    from specray.cli.output import write_json
    from specray.planning.report import check_table
    from specray.planning.simulation.fleet import Kit

    if not output.isdecimal():
        raise ConfigError(f"--output is {output!r}; allowed with --check: a number of tokens")
    if profile is not None and config.draft.has_model != (profile.draft is not None):
        raise ConfigError(
            f"the configuration has {'a' if config.draft.has_model else 'no'} draft model and the profile"
            f" {'none' if profile.draft is None else 'one'}; allowed with --check: a profile of this pair"
        )
    # The prompts on which `specray profile` measures acceptance.
    prompts = load_prompts(dataset, dataset_path, options.NUM_PROFILE_PROMPTS)
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
