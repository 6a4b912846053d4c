"""``specray bench overlap``: plain, serial and overlapped rounds of one pair, measured in turns."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Annotated

import typer

from specray.bench.plans import OverlapPlan
from specray.bench.testbed.kinds import LinkKind
from specray.cli import options
from specray.errors import ConfigError

TargetCores = Annotated[str | None, typer.Option(help="CPU cores of the target: 0 or 0,1.")]
DraftCores = Annotated[str | None, typer.Option(help="CPU cores of the draft: 0 or 0,1.")]
MaxModelLen = Annotated[int, typer.Option(min=16, help="Maximum tokens of a sequence.")]


@options.flattened
def overlap(
    plan: OverlapPlan,
    target: options.TargetModel = "embedded",
    draft: options.DraftModel = "embedded",
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    max_model_len: MaxModelLen = 1024,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure plain, serial and overlapped rounds of one pair in turns, without Ray."""
    from rich.console import Console

    from specray.bench.core.report import values_of
    from specray.bench.overlap.link import two_hosts
    from specray.bench.overlap.run import measure_overlap, overlap_table
    from specray.cli.output import write_json
    from specray.cli.settings import build_config

    if plan.link is LinkKind.NAMESPACES and not plan.delay_ms:
        raise ConfigError("--link is namespaces without --delay-ms; allowed: with it, 0 or more")
    values = pair_values(target, draft, target_cores, draft_cores, max_model_len)
    # Passes repeat their prompts: with a prefix cache there would be no prefill to measure.
    config = build_config(
        None, values | {"target.prefix_cache": False, "draft.prefix_cache": False}, settings or []
    )
    with (
        two_hosts() if plan.link is LinkKind.NAMESPACES else nullcontext() as hosts,
        Console(stderr=True).status("starting the pair") as status,
    ):
        results = [
            result
            for delay_ms in plan.delay_ms or (None,)
            for result in asyncio.run(
                measure_overlap(config, plan, delay_ms=delay_ms, hosts=hosts, progress=status.update)
            )
        ]
    Console().print(overlap_table(results))
    write_json([values_of(result) for result in results], json_path)


def pair_values(
    target: str | None,
    draft: str | None,
    target_cores: str | None,
    draft_cores: str | None,
    max_model_len: int,
) -> dict[str, object]:
    """Settings of a pair on cores of its own."""
    return {
        "target.model": target,
        "draft.model": draft,
        "target.max_model_len": max_model_len,
        "draft.max_model_len": max_model_len,
        "target.cores": cores(target_cores),
        "draft.cores": cores(draft_cores),
    }


def cores(text: str | None) -> list[int] | None:
    """Reads ``0,1``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"cores are {text!r}; allowed: numbers with commas between, such as 0,1") from None
