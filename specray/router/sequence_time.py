"""What a sequence adds to a step of the target beside its rows: its keys and values are read."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2
"""Of a sample, in the means of its kind."""
_FADING = 0.98
"""Per sample that tells something."""
_DOUBT = 20.0
"""Squared sequences: less than a few samples of other numbers than usual say next to nothing."""


@dataclass(slots=True)
class _Mean:
    num_sequences: float
    seconds: float


class SequenceTime:
    """Seconds per sequence, from steps of as many rows that had fewer sequences or more.

    Samples are compared with the mean of their kind only, so what rows cost does not matter: it is the slope
    of a regression within kinds, pooled over them.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[int, bool], _Mean] = {}
        self._product = 0.0
        self._square = 0.0

    @property
    def value(self) -> float:
        """Seconds, 0 or more; 0 while all steps of a kind had as many sequences."""
        return max(0.0, self._product / (self._square + _DOUBT))

    def add(self, size: int, num_sequences: int, seconds: float, *, is_overlapped: bool) -> None:
        """Takes a step of ``size`` rows, about; a draft that works meanwhile makes it another kind."""
        kind = size, is_overlapped
        mean = self._means.get(kind)
        if mean is None:
            self._means[kind] = _Mean(num_sequences, seconds)
            return
        more, longer = num_sequences - mean.num_sequences, seconds - mean.seconds
        if abs(more) >= 1.0:
            self._product = _FADING * self._product + (1 - _WEIGHT) * more * longer
            self._square = _FADING * self._square + (1 - _WEIGHT) * more * more
        mean.num_sequences += _WEIGHT * more
        mean.seconds += _WEIGHT * longer
