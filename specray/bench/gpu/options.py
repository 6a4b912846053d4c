"""Parses the command line without heavy imports, so that a wrong option fails at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specray.types import MAX_SPECULATIVE_TOKENS

SHAPES = ("tiny", "1b", "8b")
DTYPES = ("bfloat16", "float32")
STAGES_WITHOUT_MODEL = ("sampling", "attention")
"""Stages that are measured once, whatever the shape of the target."""
STAGES = (*STAGES_WITHOUT_MODEL, "proposals", "forwards", "pair", "transformers")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one run."""

    shapes: tuple[str, ...]
    stages: tuple[str, ...]
    device: str
    draft_device: str
    dtype: str
    num_prompts: int
    max_tokens: int
    num_repeats: int
    ks: tuple[int, ...]
    """Numbers of draft tokens (K) to measure."""
    report: Path
    models: Path | None
    """Directory for inflated checkpoints; None: a temporary one."""
    stage_timeout_s: float


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parses the command line; a wrong one ends the process with a message."""
    parser = argparse.ArgumentParser(prog="python -m specray.bench.gpu", description=__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; default: 1b 8b")
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--draft-device", choices=("cuda", "cpu"), help="default: the target's device, which both then share"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of what is timed")
    parser.add_argument("--num-prompts", type=_positive, default=8)
    parser.add_argument("--max-tokens", type=_positive, default=128, help="new tokens for each prompt")
    parser.add_argument("--num-repeats", type=_positive, default=2, help="passes per arm, in turns")
    parser.add_argument("--k", action="append", type=_positive, help="draft tokens; may be repeated")
    parser.add_argument("--report", type=Path, required=True, help="directory for report.md and report.json")
    parser.add_argument("--models", type=Path, help="directory in which inflated checkpoints are kept")
    parser.add_argument("--stage-timeout", type=_seconds, default=480.0, help="seconds for any one stage")
    parsed = parser.parse_args(arguments)
    ks = tuple(parsed.k or (2, 4))
    if max(ks) > MAX_SPECULATIVE_TOKENS:
        parser.error(f"--k is {max(ks)}; allowed: 1..{MAX_SPECULATIVE_TOKENS}")
    return Options(
        shapes=tuple(parsed.shape or ("1b", "8b")),
        stages=tuple(parsed.stage or STAGES),
        device=parsed.device,
        draft_device=parsed.draft_device or parsed.device,
        dtype=parsed.dtype,
        num_prompts=parsed.num_prompts,
        max_tokens=parsed.max_tokens,
        num_repeats=parsed.num_repeats,
        ks=ks,
        report=parsed.report,
        models=parsed.models,
        stage_timeout_s=parsed.stage_timeout,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed; allowed: 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: more than 0")
    return value
