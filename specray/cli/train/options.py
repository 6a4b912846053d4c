"""Options that all commands of ``specray train`` share, and what a run is made of by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specray.cli.options import option
from specray.train.draft.loss_kind import LossKind

if TYPE_CHECKING:
    from specray.train.draft.loss import LossConfig
    from specray.train.draft.text import TextConfig
    from specray.train.heads.loading import Adapt
    from specray.train.loop import RunLimit

_TIME_BUDGET_S = 4800.0
"""Seconds of training where neither steps nor a time are given."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run is, its text, its end, and its steps."""

    work_dir: Path = option(
        Path("specray-train"),
        "Directory of the run; the same command again goes on from there. Methods may share one, "
        "and then its text.",
    )
    device: str = option("cpu", "cpu or cuda.")
    adapter: Path | None = option(
        None,
        "Directory of a LoRA adapter that is merged into the target's weights, and with which it writes.",
    )
    prompts: Path | None = option(
        None,
        "Prompts that the target answers: JSON lines with 'prompt', and 'domain' if they have one. "
        "Default: it begins all text itself.",
    )
    mix: str | None = option(
        None,
        "Shares of domains, such as code=0.5,chat=0.5: those of --prompts, and open, first-words, "
        "task and text, which need none. Default: as the prompts are spread.",
    )
    chat: bool = option(True, "Ask in the target's chat template, where it has one, or for continuations.")
    writing_budget: float = option(1800, "Seconds in which the target writes.", min=1)
    time_budget: float | None = option(
        None, f"Seconds of training; default: {_TIME_BUDGET_S:.0f}, unless --steps is given.", min=1
    )
    steps: int | None = option(None, "Training steps, instead of a time.", min=1)
    num_rows: int = option(100_000, "Rows of text, at most.", min=2)
    rows_per_batch: int = option(32, "Rows that are written side by side.", min=1)
    rows_per_step: int = option(16, "Rows of a training step.", min=1)
    rows_per_forward: int | None = option(None, "Rows of a forward; default: as the method.", min=1)
    row_len: int = option(768, "Tokens of a row.", min=32)
    loss: LossKind = option(
        LossKind.KL_TV,
        "Divergence from the target's distribution; with the total variation distance in the last "
        "two fifths of the run; or turning into it as more is accepted (LK).",
    )
    seed: int = option(0, "Seed of weights, texts and their order.")

    def limit(self) -> RunLimit:
        """The run's end. Raises ConfigError where both are given."""
        from specray.train.loop import RunLimit

        is_default = self.steps is None and self.time_budget is None
        return RunLimit(self.steps, _TIME_BUDGET_S if is_default else self.time_budget)

    def text(self) -> TextConfig:
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

    def adapt(self) -> Adapt | None:
        """What merges the adapter; None: there is none. Raises ConfigError for one that is refused."""
        if self.adapter is None:
            return None
        from specray.engine.model.checkpoint.adapter import read_adapter

        return read_adapter(str(self.adapter)).merge

    def loss_config(self) -> LossConfig:
        from specray.train.draft.loss import LossConfig

        return LossConfig(self.loss)


@dataclass(frozen=True, slots=True)
class HeadOptions(RunOptions):
    """Options of head training."""

    evaluate_every: float = option(
        600, "Seconds between two evaluations; what is trained is written each time.", min=1
    )
    readings_gib: float = option(
        4.0, "GiB of memory for what is read of the target, so that it runs once over a row.", min=0
    )
