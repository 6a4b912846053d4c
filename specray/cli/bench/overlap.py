"""``specray bench overlap``: plain, serial and overlapped rounds of one pair, measured in turns."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.bench.testbed.kinds import LinkKind
from specray.cli import options
from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap

if TYPE_CHECKING:
    from specray.bench.core.arm import Arm
    from specray.config import Config

DEFAULT_ARMS = ("off:0", "serial:2", "serial:3", "serial:4", "auto:auto")

TargetCores = Annotated[str | None, typer.Option(help="CPU cores of the target: 0 or 0,1.")]
DraftCores = Annotated[str | None, typer.Option(help="CPU cores of the draft: 0 or 0,1.")]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        help="OVERLAP:K or OVERLAP:K:TREE, such as serial:3, enumerate:2, serial:auto:auto, enumerate:4:16, "
        "off:0; may be repeated. "
        f"Default: {', '.join(DEFAULT_ARMS)}."
    ),
]
Delays = Annotated[
    list[float] | None,
    typer.Option(min=0, help="Delay added between router and draft, each way; may be repeated."),
]
LinkOption = Annotated[
    LinkKind,
    typer.Option(
        help="What makes the delay: a process that relays the bytes, or a network namespace for the draft "
        "(needs root)."
    ),
]
NumPrompts = Annotated[
    int, typer.Option(min=1, help="Prompts per pass; at least two for each request at a time.")
]
NumRepeats = Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")]
Concurrencies = Annotated[
    list[int] | None, typer.Option(min=1, max=256, help="Requests at a time; may be repeated.")
]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Output tokens per prompt; the mean, with several requests at a time.")
]
MaxModelLen = Annotated[int, typer.Option(min=16, help="Maximum tokens of a sequence.")]


def overlap(
    target: options.TargetModel = "embedded",
    draft: options.DraftModel = "embedded",
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    arm: Arms = None,
    temperature: options.Temperatures = None,
    delay_ms: Delays = None,
    link: LinkOption = LinkKind.RELAY,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: NumPrompts = 4,
    num_repeats: NumRepeats = 2,
    concurrency: Concurrencies = None,
    max_tokens: MaxTokens = 128,
    max_model_len: MaxModelLen = 1024,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure plain, serial and overlapped rounds of one pair in turns, without Ray."""
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.overlap.link import two_hosts
    from specray.bench.overlap.run import measure_overlap, num_prompts_of, overlap_table
    from specray.cli.output import write_json

    if link is LinkKind.NAMESPACES and not delay_ms:
        raise ConfigError("--link is namespaces without --delay-ms; allowed: with it, 0 or more")
    config = _config(target, draft, cores(target_cores), cores(draft_cores), max_model_len, settings or [])
    arms = [parse_arm(text) for text in arm or DEFAULT_ARMS]
    concurrencies = concurrency or [1]
    most = max(num_prompts_of(num_prompts, places) for places in concurrencies)
    prompts = load_prompts(dataset, dataset_path, most)
    with (
        two_hosts() if link is LinkKind.NAMESPACES else nullcontext() as hosts,
        Console(stderr=True).status("starting the pair") as status,
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


def _config(
    target: str | None,
    draft: str | None,
    target_cores: list[int] | None,
    draft_cores: list[int] | None,
    max_model_len: int,
    settings: list[str],
) -> Config:
    from specray.cli.settings import build_config

    values: dict[str, object] = {
        "target.model": target,
        "draft.model": draft,
        "target.max_model_len": max_model_len,
        "draft.max_model_len": max_model_len,
        "target.cores": target_cores,
        "draft.cores": draft_cores,
        # Passes repeat their prompts: with a prefix cache there would be no prefill to measure.
        "target.prefix_cache": False,
        "draft.prefix_cache": False,
    }
    return build_config(None, values, settings)


def cores(text: str | None) -> list[int] | None:
    """Reads ``0,1``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"cores are {text!r}; allowed: numbers with commas between, such as 0,1") from None


def parse_arm(text: str) -> Arm:
    """Reads ``OVERLAP:K`` or ``OVERLAP:K:TREE``, the tree as ``--tree`` has it. Raises ConfigError."""
    from specray.bench.overlap.run import overlap_arm
    from specray.config import parse_config

    overlap, _, rest = text.partition(":")
    k, has_tree, tree = rest.partition(":")
    overlaps = [*(str(known) for known in Overlap), "auto", "off"]
    is_k = k == "auto" or (k.isdecimal() and int(k) <= MAX_SPECULATIVE_TOKENS)
    if overlap not in overlaps or not is_k or (overlap == "off") != (k == "0") or (k == "0" and has_tree):
        raise ConfigError(
            f"--arm is {text!r}; allowed: OVERLAP:K with OVERLAP one of {', '.join(overlaps[:-1])} and K in "
            f"1..{MAX_SPECULATIVE_TOKENS} or auto, then :TREE or nothing, or off:0"
        )
    if overlap == "off":
        return overlap_arm(0, Overlap.SERIAL)
    if has_tree:
        parse_config({"speculation": {"tree": tree}})
    return overlap_arm(int(k) if k.isdecimal() else k, overlap, tree if has_tree else None)
