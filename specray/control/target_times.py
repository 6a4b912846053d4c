"""Seconds of a target's steps: measured, corrected for the machine's load, and predicted.

Steps are tabled by rows, apart for steps next to a working draft and for steps with prompts. Two things
follow from the sequences too and are kept out of the tables: attention to what sequences hold is a term of
its own, the experts that rows hit are a factor (``experts``). So a step is predicted from rows and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specray.control.estimators import TimeTable
from specray.control.experts import ExpertUse
from specray.engine_info import RoutedExperts

UNMEASURED_SLOWDOWN = 1.1
"""Ratio of a target step next to a working draft to one alone, before one was measured: engines often share
cores or memory. On two shared cores it is 1.25."""


@dataclass(slots=True)
class TargetTimes:
    """Times of one target's steps.

    Steps with prompts are tabled apart: of as many rows they take a third longer, since nearly each has a
    size of its own, prompts attend to themselves, and arriving requests are read on the same machine.
    """

    rounds: dict[bool, TimeTable] = field(default_factory=lambda: {False: TimeTable(), True: TimeTable()})
    """Steps without prompts, by whether the draft works meanwhile and slows the target."""
    prompts: TimeTable = field(default_factory=TimeTable)
    """Steps with prompts."""
    context_token_s: float = 0.0
    """Seconds per token that a step's sequences hold, as the engine says. The tables are without it."""
    context_row_share: float = 0.0
    """Share of that time which each further row of a sequence adds, as the engine says."""
    experts: ExpertUse = field(default_factory=ExpertUse)
    """The tables of rounds are of steps that hit the experts of one row."""
    context_len: float = 0.0
    """Average tokens of a sequence, in recent steps."""
    num_prompt_rows: float = 0.0
    """Rows of recent steps with prompts, in ``prompts_s`` seconds."""
    prompts_s: float = 0.0
    load_factor: float = 1.0
    """``TimeTable.load_factor`` of the last step without prompts."""

    def expect_experts(self, info: RoutedExperts | None) -> None:
        """Sets what a target says of its experts; forgets what was counted of another's."""
        known = self.experts.info
        if info is None or known is None or replace(info, share=known.share) != known:
            self.experts = ExpertUse(info)
        else:
            self.experts.info = info

    def add(
        self,
        num_rows: int,
        seconds: float,
        *,
        num_sequences: int = 0,
        num_context_tokens: int = 0,
        num_experts: int | None = None,
        num_branches: int = 0,
        is_overlapped: bool = False,
        has_prompt: bool = False,
    ) -> None:
        """Takes a step.

        Args:
            num_context_tokens: that all its sequences hold together, with its rows.
            num_experts: that its rows hit, in all layers; None: they were not counted.
            num_branches: rows of trees besides their first chains.
        """
        if num_sequences and not has_prompt:
            # Of the last ten steps or so.
            weight = 0.1 if self.context_len else 1.0
            self.context_len += weight * (num_context_tokens / num_sequences - self.context_len)
        times = self.prompts if has_prompt else self.rounds[is_overlapped]
        context_s = times.load_factor * self.context_token_s * num_context_tokens
        if num_sequences and not has_prompt:
            context_s *= self._readings(num_rows, num_sequences) / num_sequences
        # Rows take a tenth of a step at least, whatever the engine says of its context.
        seconds = max(0.1 * seconds, seconds - context_s)
        if has_prompt:
            times.add(num_rows, seconds)
            # Of the last twenty steps or so.
            self.num_prompt_rows = 0.95 * self.num_prompt_rows + num_rows
            self.prompts_s = 0.95 * self.prompts_s + seconds
            return
        if num_experts is None:
            seconds /= self.experts.expected_factor(num_rows, num_sequences, num_branches)
        else:
            seconds /= self.experts.factor(num_experts)
            if not num_branches:
                self.experts.add(num_rows, num_sequences, num_experts)
        times.add(num_rows, seconds)
        self.load_factor = times.load_factor

    def predict(
        self, num_rows: int, num_sequences: int, *, num_branches: float = 0.0, is_overlapped: bool = False
    ) -> float | None:
        """Seconds of a step without prompts; None: nothing is known. ``num_branches`` as for ``add``."""
        times = self.of(is_overlapped=is_overlapped)
        seconds = times.predict(num_rows)
        if seconds is None:
            return None
        seconds *= self.experts.expected_factor(num_rows, num_sequences, num_branches)
        seconds += times.load_factor * self.context_s(self._readings(num_rows, num_sequences))
        if self.rounds[is_overlapped] or not is_overlapped:
            return seconds
        return UNMEASURED_SLOWDOWN * seconds

    def _readings(self, num_rows: int, num_sequences: int) -> float:
        """Sequences of one row each whose contexts take as long."""
        return num_sequences + self.context_row_share * max(0, num_rows - num_sequences)

    def context_s(self, num_sequences: float) -> float:
        """Seconds of a step for the tokens that its sequences hold, at a load factor of 1."""
        return self.context_token_s * self.context_len * num_sequences

    def of(self, *, is_overlapped: bool) -> TimeTable:
        """Table of steps without prompts; of the other kind while this kind was not measured."""
        return self.rounds[is_overlapped] or self.rounds[not is_overlapped]
