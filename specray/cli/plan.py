"""``specray plan``: how many target groups and drafts a load needs, found by simulation."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.cli.options import option
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.plan_check import LoadRunner
    from specray.config import Config
    from specray.planning.profile import Profile
    from specray.planning.search import Demand

MAX_RATIO = 8
"""Largest number of drafts per target group that is tried."""
DEFAULT_RATIOS = "0,0.25,0.5,1"
_RAYS_SHARE = 0.7
"""Share of a machine's memory that Ray offers; the rest is its own and its object store's."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load, and what is to hold for it."""

    profile: list[Path] | None = option(
        None, "Profile that `specray profile` wrote; repeat it to choose between kinds of hardware."
    )
    rate: float | None = option(None, "Requests per second.", min=0.001)
    prompt: str = option(
        "512", "Prompt tokens: a number, lognormal:MEAN,P95, or @FILE with one number per line."
    )
    output: str = option("128", "Output tokens, in the same form.")
    shared_prefixes: str | None = option(
        None, "NUMBER,TOKENS[,SHARE]: prompts share that many beginnings of that length; else none do."
    )
    temperature: options.Temperature = 0.0
    slo_ttft_ms: float | None = option(None, "Target for the time to first token, in ms.", min=0.001)
    slo_itl_ms: float | None = option(
        None, "Target for a request's mean inter-token latency, in ms.", min=0.001
    )
    slo_share: float = option(0.95, "Share of the requests that must meet both targets.", min=0.01, max=1)
    drafts_per_group: str = option(
        DEFAULT_RATIOS, "Drafts per target group to try: numbers or fractions with commas; 0 is no draft."
    )
    max_groups: int = option(256, "Maximum number of target groups.", min=1, max=4096)
    cost: list[str] | None = option(
        None, "NAME=USD_PER_HOUR of one device; NAME is a part of its name. May be repeated."
    )
    network_ms: float = option(
        0.0, "Round trip between router and draft in ms, on top of the measured one.", min=0
    )
    num_gpus: float | None = option(
        None, "For several models: GPUs of the cluster; default: as many as they need.", min=0
    )
    seed: options.Seed = 0
    num_requests: int = option(200, "Approximate number of requests in a simulation.", min=20, max=100_000)

    def demand(self) -> Demand:
        """Raises ConfigError where something is missing, or a length is none."""
        from specray.planning.load import OpenLoad, parse_lengths, parse_prefixes
        from specray.planning.search import Demand
        from specray.planning.simulation.results import Slo

        if not self.profile:
            raise ConfigError("--profile is missing; allowed: a file that `specray profile` wrote")
        if self.rate is None:
            raise ConfigError("--rate is missing; allowed: requests per second, more than 0")
        lengths = parse_lengths(self.prompt, "prompt"), parse_lengths(self.output, "output")
        prefixes = None if self.shared_prefixes is None else parse_prefixes(self.shared_prefixes)
        return Demand(
            OpenLoad(self.rate, *lengths, self.temperature, prefixes=prefixes),
            Slo(self.slo_ttft_ms, self.slo_itl_ms, self.slo_share),
            max_groups=self.max_groups,
            seed=self.seed,
            num_requests=self.num_requests,
        )


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How the configured pair is loaded, and compared with the prediction."""

    check: bool = option(
        False,
        "Start the configured pair here, load it, and compare with the prediction; without "
        "--profile, measure its profile too.",
        "--check",
    )
    concurrency: list[int] | None = option(None, "With --check: requests at a time; may be repeated.", min=1)
    num_passes: int = option(3, "With --check: passes over all loads; the median counts.", min=1, max=50)
    dataset: Dataset = option(Dataset.BUILTIN, "With --check: source of the prompts.")
    dataset_path: Path | None = option(None, "With --check: file of the data set.")


@options.flattened
def plan(
    load: Load,
    checked: CheckOptions,
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]", help="Configuration whose speculation and router are simulated."
        ),
    ] = None,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Find how many target groups and drafts a load needs, by simulation from measured profiles.

    Of a configuration of several models it says what they need, what is loaded together, and what leaves.

    The real router runs against simulated engines in virtual time. With --check the configured pair is
    started here, loaded, and compared with what the first profile predicts.
    """
    from specray.cli.settings import build_config
    from specray.planning.profile import load_profile

    config = build_config(config_path, {}, settings or [])
    profiles = [load_profile(path) for path in load.profile or ()]
    if config.models:
        _plan_models(config, load.num_gpus, json_path)
    elif checked.check:
        _check(config, profiles[0] if profiles else None, load, checked, json_path)
    else:
        _plan(config, profiles, load, json_path)


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


def _plan(config: Config, profiles: list[Profile], load: Load, json_path: Path | None) -> None:
    from rich.console import Console

    from specray.cli.output import write_json
    from specray.planning.hardware import make_offers, parse_costs
    from specray.planning.report import plan_json, plan_table, recommendation
    from specray.planning.search import make_plan

    demand, ratios, prices = load.demand(), parse_ratios(load.drafts_per_group), parse_costs(load.cost or ())
    offers = make_offers(
        profiles,
        prices,
        temperature=load.temperature,
        speculation=config.speculation,
        router_config=config.router,
        network_s=load.network_ms / 1e3,
    )
    with _routers_silent(), Console(stderr=True).status("simulating") as status:
        made = make_plan(offers, ratios, demand, progress=status.update)
    has_prices = bool(prices)
    console = Console()
    console.print(plan_table(made, has_prices=has_prices))
    console.print(recommendation(made, has_prices=has_prices), highlight=False)
    write_json(plan_json(made), json_path)


def _plan_models(config: Config, num_gpus: float | None, json_path: Path | None) -> None:
    from rich.console import Console

    from specray.cli.output import write_json
    from specray.planning.models import plan_models
    from specray.planning.report import models_json, models_table

    memory = config.loading.memory_gib
    num_bytes = _RAYS_SHARE * _physical_bytes() if memory == "auto" else memory * 2**30
    made = plan_models(config, memory_bytes=num_bytes, num_gpus=num_gpus)
    Console().print(models_table(made))
    write_json(models_json(made), json_path)


def _physical_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    config: Config, profile: Profile | None, load: Load, checked: CheckOptions, json_path: Path | None
) -> None:
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.plan_check import LoadRunner, compare, measure_loads
    from specray.cli.output import write_json
    from specray.planning.report import check_table
    from specray.planning.simulation.fleet import Kit

    if not load.output.isdecimal():
        raise ConfigError(f"--output is {load.output!r}; allowed with --check: a number of tokens")
    if profile is not None and config.draft.has_model != (profile.draft is not None):
        raise ConfigError(
            f"the configuration has {'a' if config.draft.has_model else 'no'} draft model and the profile"
            f" {'none' if profile.draft is None else 'one'}; allowed with --check: a profile of this pair"
        )
    # The prompts on which `specray profile` measures acceptance.
    prompts = load_prompts(checked.dataset, checked.dataset_path, options.NUM_PROFILE_PROMPTS)
    with Console(stderr=True).status("starting the pair") as status:
        runner = LoadRunner(
            config,
            prompts,
            concurrency=checked.concurrency or (1, 4, 8),
            max_tokens=int(load.output),
            temperature=load.temperature,
            progress=status.update,
        )
        if profile is None:
            profile = asyncio.run(
                _profile_in_turn(config, prompts, runner, load.temperature, checked.num_passes, status.update)
            )
        else:
            asyncio.run(measure_loads(runner, config, num_passes=checked.num_passes))
    kit = Kit(
        profile.target,
        profile.draft,
        profile.acceptance_at(load.temperature),
        profile.router,
        shares_hardware=True,
        is_replay=True,
        router_config=config.router,
        speculation=config.speculation,
    )
    rows = compare(kit, runner.measured)
    Console().print(check_table(rows, temperature=load.temperature))
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
