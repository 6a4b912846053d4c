"""``specray train``: trains drafts for a target on text that the target writes."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train drafts for a target.")


@app.callback()
def _group() -> None:
    """Train drafts for a target."""


@app.command()
def draft(
    target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id of a Llama-like chat model.")],
    work_dir: Annotated[
        Path, typer.Option(help="Directory of the run; the same command again goes on from there.")
    ] = Path("specray-draft"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    writing_budget: Annotated[float, typer.Option(min=1, help="Seconds in which the target writes.")] = 3600,
    time_budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds of training; default: 7200, unless --steps is given.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of a time.")] = None,
    num_rows: Annotated[int, typer.Option(min=2, help="Rows of text, at most.")] = 100_000,
    rows_per_batch: Annotated[int, typer.Option(min=1, help="Rows that are written side by side.")] = 32,
    rows_per_step: Annotated[int, typer.Option(min=3, help="Rows of a training step.")] = 16,
    rows_per_forward: Annotated[int, typer.Option(min=1, help="Rows of a forward.")] = 4,
    row_len: Annotated[int, typer.Option(min=32, help="Tokens of a row.")] = 768,
    max_vocabulary: Annotated[
        int, typer.Option(min=64, help="Ids that the draft can propose, at most.")
    ] = 12_288,
    seed: Annotated[int, typer.Option(help="Seed of weights, texts and their order.")] = 0,
) -> None:
    """Train a small draft; what it writes is completed with the target's embedding when it is served."""
    from specray.train.draft.completion import complete_draft
    from specray.train.draft.training import DraftTrainConfig, train_draft
    from specray.train.loop import RunLimit

    if steps is None and time_budget is None:
        time_budget = 7200.0
    config = DraftTrainConfig(
        limit=RunLimit(steps, time_budget),
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
