"""Records each process's anonymous memory from /proc over its life, where leaks show.

Pages of files and shared memory are left out: they come and go with other processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_COMPARED = 3
"""Samples at either end whose medians are compared."""
MAX_COURSE = 40


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    pid: int
    name: str
    span_s: float
    first_bytes: int
    last_bytes: int
    course_bytes: tuple[int, ...] = ()
    """All samples in bytes, warm-up included, at most ``MAX_COURSE``."""

    @property
    def num_bytes(self) -> int:
        """Bytes by which it grew."""
        return self.last_bytes - self.first_bytes

    @property
    def share(self) -> float:
        """Growth as a share: 0.02 means 2 % more at the end."""
        return self.last_bytes / self.first_bytes - 1 if self.first_bytes else 0.0


class MemoryRecord:
    """Samples of all processes by id.

    Args:
        warmup_s: age of a process in seconds from which its memory is compared.
        min_span_s: seconds for which it must have been watched after that.
    """

    def __init__(self, *, warmup_s: float, min_span_s: float) -> None:
        self._warmup_s = warmup_s
        self._min_span_s = min_span_s
        self._warm_s = -math.inf
        self._samples: dict[int, list[Sample]] = {}
        self._names: dict[int, str] = {}

    def add(self, pid: int, name: str, sample: Sample) -> None:
        self._samples.setdefault(pid, []).append(sample)
        self._names[pid] = name

    def warm_from(self, at_s: float) -> None:
        """Compares no process with its memory before this time."""
        self._warm_s = at_s

    @property
    def num_processes(self) -> int:
        return len(self._samples)

    def growths(self) -> tuple[Growth, ...]:
        """Returns processes that lived long enough to be judged, those that grew most first."""
        found = (self._growth(pid, samples) for pid, samples in self._samples.items())
        return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.share))

    def unjudged(self) -> tuple[str, ...]:
        """Returns names of which no process lived long enough."""
        judged = {growth.name for growth in self.growths()}
        return tuple(sorted(set(self._names.values()) - judged))

    def _growth(self, pid: int, samples: Sequence[Sample]) -> Growth | None:
        from_s = max(self._warm_s, samples[0].at_s + self._warmup_s)
        warm = [sample for sample in samples if sample.at_s >= from_s]
        if len(warm) < 2 * NUM_COMPARED or warm[-1].at_s - warm[0].at_s < self._min_span_s:
            return None
        return Growth(
            pid,
            self._names[pid],
            warm[-1].at_s - warm[0].at_s,
            _median(warm[:NUM_COMPARED]),
            _median(warm[-NUM_COMPARED:]),
            tuple(sample.num_bytes for sample in samples[:: math.ceil(len(samples) / MAX_COURSE)]),
        )


def anonymous_bytes(pid: int) -> int | None:
    """Returns the bytes that a process holds now; None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


def process_name(pid: int, roles: Mapping[int, str]) -> str:
    """Returns the process's role in the service, or else its own name."""
    if pid in roles:
        return roles[pid]
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    names = [Path(word.decode("utf-8", "replace")).name[:40] for word in words[:4]]
    if names[0].startswith("python"):
        # The script or module that it runs comes after its options.
        names = [name for name in names[1:] if not name.startswith("-")] or names
    return names[0] or "?"


def _median(samples: Sequence[Sample]) -> int:
    return int(statistics.median(sample.num_bytes for sample in samples))
