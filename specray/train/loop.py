"""The training loop that target and draft share: progress, checkpoints, limits."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specray.errors import ConfigError
from specray.train.optim import MasterOptimizer


def usable_device(device: str) -> str:
    """The name of a device on which a run can be. Raises ConfigError where torch cannot use it."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device is {device!r}, which cannot be used ({reason}); "
            "allowed: cpu, or cuda where there is one"
        ) from None
    return device


@dataclass(frozen=True, slots=True)
class RunLimit:
    """The end of a run: after `num_steps`, or after `time_budget_s` seconds of training over all resumes.

    A run limited by steps is a pure function of its seed; one limited by time has a schedule that
    follows the clock, and its log says after how many steps it ended.
    """

    num_steps: int | None = None
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.time_budget_s is None):
            raise ConfigError("give exactly one of num_steps and time_budget_s")
        if (self.num_steps or self.time_budget_s or 0) <= 0:
            raise ConfigError(f"num_steps or time_budget_s must be positive, got {self}")

    def progress(self, state: "RunState") -> float:
        """Returns the share of the run that is done, 1 at its end."""
        if self.num_steps is not None:
            return min(state.step / self.num_steps, 1.0)
        assert self.time_budget_s is not None
        return min(state.elapsed_s / self.time_budget_s, 1.0)


@dataclass(slots=True)
class RunState:
    """Progress of a run; everything else that a resume needs is in the optimizer."""

    step: int = 0
    cursor: int = 0  # windows consumed
    num_tokens: int = 0
    elapsed_s: float = 0.0


@dataclass(slots=True)
class TrainingRun:
    """A resumable loop that calls `step_fn(state, progress)` until the limit, and saves now and then.

    `step_fn` returns the figures of one step (at least "loss"), having advanced cursor and num_tokens.
    """

    name: str
    directory: Path
    optimizer: MasterOptimizer
    limit: RunLimit
    checkpoint_every_s: float = 600.0
    log_every: int = 25
    state: RunState = field(default_factory=RunState)

    @property
    def _checkpoint_file(self) -> Path:
        return self.directory / f"{self.name}.ckpt.pt"

    def run(
        self,
        step_fn: Callable[[RunState, float], dict[str, float]],
        *,
        on_checkpoint: Callable[[], dict[str, float]] | None = None,
        stop_after: int | None = None,
    ) -> RunState:
        """Runs to the limit (or for `stop_after` steps of this call) and saves; returns the final state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._resume()
        first_step, clock = self.state.step, time.monotonic()
        saved_at = clock
        with progress_bar() as bar:
            task = bar.add_task(self.name, total=1000, figures="")
            while (progress := self.limit.progress(self.state)) < 1.0:
                if stop_after is not None and self.state.step - first_step >= stop_after:
                    break
                figures = step_fn(self.state, progress)
                self.state.step += 1
                # Saving and evaluation count, too: a time budget is wall time.
                clock, before = time.monotonic(), clock
                self.state.elapsed_s += clock - before
                self._report(bar, task, figures)
                if clock - saved_at > self.checkpoint_every_s:
                    saved_at = clock
                    self._save()
                    if on_checkpoint is not None:
                        self._log(on_checkpoint())
        self._save()
        if on_checkpoint is not None:
            self._log(on_checkpoint())
        return self.state

    def _report(self, bar: Progress, task: Any, figures: dict[str, float]) -> None:
        text = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        bar.update(task, completed=int(1000 * self.limit.progress(self.state)), figures=text)
        if self.state.step % self.log_every == 0:
            self._log(figures)

    def _log(self, figures: dict[str, float]) -> None:
        rate = self.state.num_tokens / max(self.state.elapsed_s, 1e-9)
        row = {
            "step": self.state.step,
            "num_tokens": self.state.num_tokens,
            "elapsed_s": round(self.state.elapsed_s, 1),
            "tokens_per_s": round(rate),
            **{name: round(value, 5) for name, value in figures.items()},
        }
        with (self.directory / f"{self.name}.log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _save(self) -> None:
        state = self.state
        partial = self._checkpoint_file.with_suffix(".partial")
        torch.save(
            {
                "optimizer": self.optimizer.state_dict(),
                "step": state.step,
                "cursor": state.cursor,
                "num_tokens": state.num_tokens,
                "elapsed_s": state.elapsed_s,
            },
            partial,
        )
        partial.replace(self._checkpoint_file)

    def _resume(self) -> None:
        if not self._checkpoint_file.exists():
            return
        saved = torch.load(self._checkpoint_file, weights_only=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = RunState(saved["step"], saved["cursor"], saved["num_tokens"], saved["elapsed_s"])


def progress_bar() -> Progress:
    """A bar on standard error; its tasks have a field ``figures``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )
