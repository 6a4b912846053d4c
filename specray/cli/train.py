"""``specray train``: trains drafts and heads for a target on text that the target writes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specray.train.heads.training import HeadTrainConfig, Method
    from specray.train.loop import RunLimit

app = typer.Typer(no_args_is_help=True, help="Train drafts and heads for a target.")

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
WritingBudget = Annotated[float, typer.Option(min=1, help="Seconds in which the target writes.")]
TimeBudget = Annotated[
    float | None, typer.Option(min=1, help="Seconds of training; default: 7200, unless --steps is given.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps, instead of a time.")]
NumRows = Annotated[int, typer.Option(min=2, help="Rows of text, at most.")]
RowsPerBatch = Annotated[int, typer.Option(min=1, help="Rows that are written side by side.")]
RowsPerForward = Annotated[int, typer.Option(min=1, help="Rows of a forward.")]
RowLen = Annotated[int, typer.Option(min=32, help="Tokens of a row.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, texts and their order.")]
HeadTarget = Annotated[
    str,
    typer.Argument(
        help="Checkpoint directory, known name or hub id of any causal language model of transformers, or "
        "embedded."
    ),
]
HeadTimeBudget = Annotated[
    float | None, typer.Option(min=1, help="Seconds of training; default: 4800, unless --steps is given.")
]
HeadWorkDir = Annotated[
    Path,
    typer.Option(
        help="Directory of the run; the same command again goes on from there. Methods may share one, and "
        "then its text."
    ),
]
HeadRowsPerStep = Annotated[int, typer.Option(min=1, help="Rows of a training step.")]
EvaluateEvery = Annotated[
    float, typer.Option(min=1, help="Seconds between two evaluations; the head is written each time.")
]


@app.callback()
def _group() -> None:
    """Train drafts and heads for a target."""


@app.command()
def draft(
    target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id of a Llama-like chat model.")],
    work_dir: Annotated[
        Path, typer.Option(help="Directory of the run; the same command again goes on from there.")
    ] = Path("specray-draft"),
    device: Device = "cpu",
    writing_budget: WritingBudget = 3600,
    time_budget: TimeBudget = None,
    steps: Steps = None,
    num_rows: NumRows = 100_000,
    rows_per_batch: RowsPerBatch = 32,
    rows_per_step: Annotated[int, typer.Option(min=3, help="Rows of a training step.")] = 16,
    rows_per_forward: RowsPerForward = 4,
    row_len: RowLen = 768,
    max_vocabulary: Annotated[
        int, typer.Option(min=64, help="Ids that the draft can propose, at most.")
    ] = 12_288,
    seed: Seed = 0,
) -> None:
    """Train a small draft; what it writes is completed with the target's embedding when it is served."""
    from specray.train.draft.completion import complete_draft
    from specray.train.draft.training import DraftTrainConfig, train_draft

    config = DraftTrainConfig(
        limit=_limit(steps, time_budget),
        writing_budget_s=writing_budget,
        num_rows=num_rows,
        rows_per_batch=rows_per_batch,
        rows_per_step=rows_per_step,
        rows_per_forward=rows_per_forward,
        row_len=row_len,
        max_draft_vocabulary=max_vocabulary,
        seed=seed,
    )
    compact = train_draft(target, work_dir, config, device=device)
    typer.echo(f"wrote {compact}")
    if Path(target).is_dir():
        typer.echo(f"wrote {complete_draft(compact, Path(target), work_dir / 'complete')}")


@app.command()
def eagle3(
    target: HeadTarget,
    work_dir: HeadWorkDir = Path("specray-heads"),
    device: Device = "cpu",
    writing_budget: WritingBudget = 1800,
    time_budget: HeadTimeBudget = None,
    steps: Steps = None,
    num_depths: Annotated[
        int, typer.Option(min=1, max=16, help="Steps on the head's own outputs that are trained.")
    ] = 4,
    num_rows: NumRows = 100_000,
    rows_per_batch: RowsPerBatch = 32,
    rows_per_step: HeadRowsPerStep = 16,
    rows_per_forward: RowsPerForward = 2,
    row_len: RowLen = 768,
    max_vocabulary: Annotated[
        int, typer.Option(min=64, help="Ids that the head can propose, at most.")
    ] = 12_288,
    evaluate_every: EvaluateEvery = 600,
    seed: Seed = 0,
) -> None:
    """Train an EAGLE-3 head; what it writes is served with ``specray serve --target TARGET --drafter``."""
    from specray.train.draft.text import TextConfig
    from specray.train.heads.trainer import StepConfig
    from specray.train.heads.training import HeadTrainConfig

    config = HeadTrainConfig(
        _limit(steps, time_budget, default_s=4800),
        TextConfig(writing_budget, num_rows, rows_per_batch, row_len, seed),
        StepConfig(rows_per_step, rows_per_forward, seed=seed),
        num_depths,
        evaluate_every,
        max_draft_vocabulary=max_vocabulary,
    )
    _train_head("eagle3", target, work_dir, config, device)


@app.command()
def medusa(
    target: HeadTarget,
    work_dir: HeadWorkDir = Path("specray-heads"),
    device: Device = "cpu",
    writing_budget: WritingBudget = 1800,
    time_budget: HeadTimeBudget = None,
    steps: Steps = None,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Heads, one for each place ahead.")] = 4,
    num_rows: NumRows = 100_000,
    rows_per_batch: RowsPerBatch = 32,
    rows_per_step: HeadRowsPerStep = 16,
    rows_per_forward: RowsPerForward = 1,
    row_len: RowLen = 768,
    evaluate_every: EvaluateEvery = 600,
    seed: Seed = 0,
) -> None:
    """Train Medusa heads; what it writes is served with ``specray serve --target TARGET --drafter``."""
    from specray.train.draft.text import TextConfig
    from specray.train.heads.trainer import StepConfig
    from specray.train.heads.training import HeadTrainConfig

    config = HeadTrainConfig(
        _limit(steps, time_budget, default_s=4800),
        TextConfig(writing_budget, num_rows, rows_per_batch, row_len, seed),
        StepConfig(rows_per_step, rows_per_forward, seed=seed),
        num_heads,
        evaluate_every,
    )
    _train_head("medusa", target, work_dir, config, device)


def _limit(steps: int | None, time_budget: float | None, *, default_s: float = 7200.0) -> RunLimit:
    from specray.train.loop import RunLimit

    if steps is None and time_budget is None:
        time_budget = default_s
    return RunLimit(steps, time_budget)


def _train_head(method: Method, target: str, work_dir: Path, config: HeadTrainConfig, device: str) -> None:
    from specray.train.heads.training import train_head

    head = train_head(
        method,
        _checkpoint(target),
        work_dir,
        config,
        device=device,
        has_bfloat16=has_bfloat16(device),
        name=target,
        command=shlex.join(["specray", *sys.argv[1:]]),
    )
    typer.echo(f"wrote {head}")
    typer.echo(f"serve it: specray serve --target {target} --drafter {head}")


def has_bfloat16(device: str) -> bool:
    """Whether the processor multiplies bfloat16: products of a CPU without take several times as long."""
    from specray.engine.cpu.isa import Isa, usable_isas

    return device != "cpu" or bool({Isa.AMX, Isa.AVX512_BF16}.intersection(usable_isas()))


def _checkpoint(target: str) -> str:
    """What transformers loads for a target's name. Raises ConfigError where it cannot be had."""
    from specray.cli.models.fetching import fetch_listener
    from specray.config import EMBEDDED
    from specray.demo.paths import demo_target_path
    from specray.models.cache import user_cache
    from specray.models.resolve import find_source, source_checkpoint

    if target == EMBEDDED:
        return str(demo_target_path())
    source = find_source(target)
    if source is None:
        return target
    with fetch_listener() as listener:
        return str(source_checkpoint(source, user_cache(), listener).directory)
