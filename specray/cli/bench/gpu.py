"""``specray bench gpu``: checks the tokens that an accelerator computes, and measures its speed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from specray.cli import options
from specray.cli.options import option
from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

Device = Literal["cuda", "cpu"]


class GpuShape(StrEnum):
    """Sizes of the target; ``tiny`` is the embedded one itself, ``moe`` is 1b and experts."""

    TINY = "tiny"
    TINY_MOE = "tiny-moe"
    B1 = "1b"
    B8 = "8b"
    MOE = "moe"


class GpuStage(StrEnum):
    """Parts of the measurement, in their order."""

    SAMPLING = "sampling"
    ATTENTION = "attention"
    PRODUCTS = "products"
    EXPERTS = "experts"
    RECURRENT = "recurrent"
    PROPOSALS = "proposals"
    FORWARDS = "forwards"
    DETERMINISM = "determinism"
    PAIR = "pair"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What is measured."""

    shape: list[GpuShape] | None = option(None, "Size of the target; may be repeated. Default: 1b 8b.")
    stage: list[GpuStage] | None = option(None, "Stage to run; may be repeated. Default: all.")
    device: Device = option("cuda", "Device of the target; cpu tries everything without a GPU.")
    draft_device: Device | None = option(
        None, "Device of the draft; default: the target's, which both then share."
    )
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "Number format of what is timed.")
    num_prompts: int = option(8, "Prompts that are served.", min=1)
    max_tokens: int = option(128, "New tokens for each prompt.", min=1)
    num_repeats: int = option(2, "Passes per arm, in turns.", min=1)
    k: list[int] | None = option(
        None, "Draft tokens; may be repeated. Default: 2 4.", min=1, max=MAX_SPECULATIVE_TOKENS
    )
    models: Path | None = option(None, "Directory in which inflated checkpoints stay; default: none.")
    stage_timeout: float = option(480.0, "Seconds for any one stage.")


@options.flattened
def gpu(
    report: Annotated[Path, typer.Option(help="Directory for report.md and report.json.")], given: GpuOptions
) -> None:
    """Check the tokens that a GPU computes, and measure its speed, without Ray."""
    from specray.bench.gpu.run import GpuPlan, measure_gpu

    # Not a range of the option: "nan" is in none, and above none.
    if not 0.0 < given.stage_timeout < float("inf"):
        raise ConfigError(f"--stage-timeout is {given.stage_timeout}; allowed: more than 0")
    plan = GpuPlan(
        report=report,
        shapes=tuple(one.value for one in given.shape or (GpuShape.B1, GpuShape.B8)),
        stages=tuple(one.value for one in given.stage or GpuStage),
        device=given.device,
        draft_device=given.draft_device or given.device,
        dtype=given.dtype,
        num_prompts=given.num_prompts,
        max_tokens=given.max_tokens,
        num_repeats=given.num_repeats,
        ks=tuple(given.k or (2, 4)),
        models=given.models,
        stage_timeout_s=given.stage_timeout,
    )
    try:
        found = measure_gpu(plan)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    if found:
        raise typer.Exit(1)
