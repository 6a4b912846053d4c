"""``specray bench overlap``: serial, overlapped and plain rounds, engines on cores of their own."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.testbed.kinds import LinkKind
from specray.cli.bench.output import write_json
from specray.cli.serve import Setting
from specray.errors import ConfigError
from specray.types import Overlap

if TYPE_CHECKING:
    from specray.bench.overlap.run import Arm

MAX_K = 32


def overlap(
    target: Annotated[str, typer.Option(help="Path, hub id, or embedded.")] = "embedded",
    draft: Annotated[str, typer.Option(help="Path, hub id, or embedded.")] = "embedded",
    target_cores: Annotated[str | None, typer.Option(help="Cores of the target: 0 or 0,1.")] = None,
    draft_cores: Annotated[str | None, typer.Option(help="Cores of the draft: 0 or 0,1.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="OVERLAP:K, such as serial:3, enumerate:2, auto:auto, off:0; may be repeated.",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, max=2, help="0 is greedy; may be repeated.")
    ] = None,
    delay_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            help="Added between router and draft, each way; may be repeated.",
        ),
    ] = None,
    link: Annotated[
        LinkKind,
        typer.Option(
            help="What a delay is made with: a process that passes bytes on, or the draft in a network "
            "namespace of its own (root).",
        ),
    ] = LinkKind.RELAY,
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts per pass; at least two for each of several at a time.")
    ] = 4,
    num_repeats: Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")] = 2,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Prompts at a time; may be repeated.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens per prompt; of several at a time on average.")
    ] = 128,
    max_model_len: Annotated[int, typer.Option(min=16, help="Most tokens of one sequence.")] = 1024,
    settings: Setting = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Measure plain, serial and overlapped rounds of one pair in turns, without Ray."""
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.overlap.link import two_hosts
    from specray.bench.overlap.run import measure_overlap, num_prompts_of, overlap_table
    from specray.cli.settings import build_config

    if link is LinkKind.NAMESPACES and not delay_ms:
        raise ConfigError("--link is namespaces without --delay-ms; allowed: with it, 0 or more")
    options: dict[str, object] = {
        "target.model": target,
        "draft.model": draft,
        "target.max_model_len": max_model_len,
        "draft.max_model_len": max_model_len,
        "target.cores": cores(target_cores),
        "draft.cores": cores(draft_cores),
        # Passes repeat prompts: a cached prompt would be no prefill.
        "target.prefix_cache": False,
        "draft.prefix_cache": False,
    }
    config = build_config(None, options, settings or [])
    arms = [parse_arm(text) for text in arm or ("off:0", "serial:2", "serial:3", "serial:4", "auto:auto")]
    console = Console(stderr=True)
    concurrencies = concurrency or [1]
    most = max(num_prompts_of(num_prompts, places) for places in concurrencies)
    prompts = load_prompts(dataset, dataset_path, most)
    with (
        two_hosts() if link is LinkKind.NAMESPACES else nullcontext() as hosts,
        console.status("starting the pair") as status,
    ):
        results = [
            result
            for delay in delay_ms or (None,)
            for result in asyncio.run(
                measure_overlap(
                    config,
                    arms,
                    prompts,
                    temperatures=temperature or (0.0,),
                    max_tokens=max_tokens,
                    num_prompts=num_prompts,
                    num_repeats=num_repeats,
                    delay_ms=delay,
                    hosts=hosts,
                    concurrencies=concurrencies,
                    progress=status.update,
                )
            )
        ]
    Console().print(overlap_table(results))
    write_json([asdict(result) for result in results], json_path)


def cores(text: str | None) -> list[int] | None:
    """Reads ``0,1``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"cores are {text!r}; allowed: numbers with commas between, such as 0,1") from None


def parse_arm(text: str) -> Arm:
    """Reads ``OVERLAP:K``. Raises ConfigError."""
    from specray.bench.overlap.run import Arm

    overlap, _, k = text.partition(":")
    overlaps = [*(str(known) for known in Overlap), "auto", "off"]
    is_k = k == "auto" or (k.isdecimal() and int(k) <= MAX_K)
    if overlap not in overlaps or not is_k or (overlap == "off") != (k == "0"):
        raise ConfigError(
            f"--arm is {text!r}; allowed: OVERLAP:K with OVERLAP one of {', '.join(overlaps[:-1])} and K in "
            f"1..{MAX_K} or auto, or off:0"
        )
    if overlap == "off":
        return Arm(0, Overlap.SERIAL)
    return Arm(k if k == "auto" else int(k), overlap)
