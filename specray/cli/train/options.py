"""Options that all commands of ``specray train`` share, and what a run is made of by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.train.draft.loss_kind import LossKind

if TYPE_CHECKING:
    from specray.train.draft.loss import LossConfig
    from specray.train.draft.text import TextConfig
    from specray.train.loop import RunLimit

_TIME_BUDGET_S = 4800.0
"""Seconds of training where neither steps nor a time are given."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run is, its text, its end, and its steps."""

    work_dir: Annotated[
        Path,
        typer.Option(
            help="Directory of the run; the same command again goes on from there. Methods may share one, "
            "and then its text."
        ),
    ] = Path("specray-train")
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts that the target answers: JSON lines with 'prompt', and 'domain' if they have one. "
            "Default: it begins all text itself."
        ),
    ] = None
    mix: Annotated[
        str | None,
        typer.Option(
            help="Shares of domains, such as code=0.5,chat=0.5: those of --prompts, and open, first-words, "
            "task and text, which need none. Default: as the prompts are spread."
        ),
    ] = None
    chat: Annotated[
        bool, typer.Option(help="Ask in the target's chat template, where it has one, or for continuations.")
    ] = True
    writing_budget: Annotated[float, typer.Option(min=1, help="Seconds in which the target writes.")] = 1800
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=1, help=f"Seconds of training; default: {_TIME_BUDGET_S:.0f}, unless --steps is given."
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of a time.")] = None
    num_rows: Annotated[int, typer.Option(min=2, help="Rows of text, at most.")] = 100_000
    rows_per_batch: Annotated[int, typer.Option(min=1, help="Rows that are written side by side.")] = 32
    rows_per_step: Annotated[int, typer.Option(min=1, help="Rows of a training step.")] = 16
    rows_per_forward: Annotated[
        int | None, typer.Option(min=1, help="Rows of a forward; default: as the method.")
    ] = None
    row_len: Annotated[int, typer.Option(min=32, help="Tokens of a row.")] = 768
    loss: Annotated[
        LossKind,
        typer.Option(
            help="Divergence from the target's distribution; with the total variation distance in the last "
            "two fifths of the run; or turning into it as more is accepted (LK)."
        ),
    ] = LossKind.KL_TV
    seed: Annotated[int, typer.Option(help="Seed of weights, texts and their order.")] = 0

    def limit(self) -> RunLimit:
        """The run's end. Raises ConfigError where both are given."""
        from specray.train.loop import RunLimit

        is_default = self.steps is None and self.time_budget is None
        return RunLimit(self.steps, _TIME_BUDGET_S if is_default else self.time_budget)

    def text(self) -> TextConfig:
        """The run's text."""
        from specray.train.draft.text import TextConfig

        return TextConfig(
            self.writing_budget,
            self.num_rows,
            self.rows_per_batch,
            self.row_len,
            self.seed,
            prompts=None if self.prompts is None else str(self.prompts),
            mix=self.mix,
            asks=self.chat,
        )

    def loss_config(self) -> LossConfig:
        """The run's loss."""
        from specray.train.draft.loss import LossConfig

        return LossConfig(self.loss)


@dataclass(frozen=True, slots=True)
class HeadOptions(RunOptions):
    """And when it is evaluated, and what is kept of the target."""

    evaluate_every: Annotated[
        float,
        typer.Option(min=1, help="Seconds between two evaluations; what is trained is written each time."),
    ] = 600
    readings_gib: Annotated[
        float,
        typer.Option(
            min=0, help="GiB of memory for what is read of the target, so that it runs once over a row."
        ),
    ] = 4.0
