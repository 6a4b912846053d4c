"""What steps of the target take: by their rows, by what their sequences hold, beside a working draft or not.

Steps that fill in prompts are apart from the others. Of as many rows they take a third longer: nearly each is
of a size of its own, prompts look into each other, and requests that arrive are read on the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specray.control.estimators import TimeTable

UNMEASURED_SLOWDOWN = 1.1
"""Of a target step beside a working draft, before one was measured: engines often share cores or memory. On
two shared cores it is 1.25."""
_LEAST_SHARE = 0.1
"""Of a step that its rows take, whatever is believed of its context."""
_LENGTH_WEIGHT = 0.1
"""Of a step, in the length of a sequence."""


@dataclass(slots=True)
class TargetTimes:
    """Running averages of one target, and what follows from them."""

    rounds: dict[bool, TimeTable] = field(default_factory=lambda: {False: TimeTable(), True: TimeTable()})
    """By whether the draft works meanwhile: engines that share memory slow each other."""
    prompts: TimeTable = field(default_factory=TimeTable)
    """Of steps that fill in prompts too."""
    context_token_s: float = 0.0
    """What the engine says that a token takes which a step's sequences hold. The tables are without it."""
    context_len: float = 0.0
    """Tokens of a sequence, in the last rounds."""
    pace: float = 1.0
    """Of the last rounds; see ``TimeTable``."""

    def add(
        self,
        num_rows: int,
        seconds: float,
        *,
        num_sequences: int = 0,
        num_context_tokens: int = 0,
        is_overlapped: bool = False,
        has_prompt: bool = False,
    ) -> None:
        """Takes a step.

        Args:
            num_context_tokens: that its sequences hold, all together, with its rows.
        """
        if num_sequences and not has_prompt:
            weight = _LENGTH_WEIGHT if self.context_len else 1.0
            self.context_len += weight * (num_context_tokens / num_sequences - self.context_len)
        times = self.prompts if has_prompt else self.rounds[is_overlapped]
        context_s = times.pace * self.context_token_s * num_context_tokens
        times.add(num_rows, max(_LEAST_SHARE * seconds, seconds - context_s))
        if not has_prompt:
            self.pace = times.pace

    def predict(self, num_rows: int, num_sequences: int, *, is_overlapped: bool = False) -> float | None:
        """Seconds of a step without prompts; None: nothing is known."""
        times = self.of(is_overlapped=is_overlapped)
        seconds = times.predict(num_rows)
        if seconds is None:
            return None
        seconds += times.pace * self.context_s(num_sequences)
        if self.rounds[is_overlapped] or not is_overlapped:
            return seconds
        return UNMEASURED_SLOWDOWN * seconds

    def context_s(self, num_sequences: int) -> float:
        """Of a step, for what so many sequences hold; at a pace of one."""
        return self.context_token_s * self.context_len * num_sequences

    def of(self, *, is_overlapped: bool) -> TimeTable:
        """Of rounds; of the other kind, while none of this kind was measured."""
        return self.rounds[is_overlapped] or self.rounds[not is_overlapped]
