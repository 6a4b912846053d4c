"""Judges every request of a soak: what became of it, and whether a fault excuses that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specray.bench.soak.cases import ClientOutput, Way, difference


class End(StrEnum):
    DONE = "done"
    CANCELLED = "cancelled"
    """Cancelled by the client, as planned."""
    RETRIABLE = "retriable"
    """Failed with an error that says the request may be sent again."""
    ERROR = "error"


class Judgement(StrEnum):
    OK = "ok"
    RETRIED = "retried"
    """Right at a later attempt, after its Router died or its Ingress hung."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to send a request; times in seconds from the load's beginning."""

    end: End
    output: ClientOutput
    started_s: float
    ended_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    case_index: int
    way: Way
    verdict: Judgement
    reason: str
    started_s: float
    ended_s: float


def judge(
    attempts: Sequence[Attempt], reference: ClientOutput, *, deaths_s: Sequence[float], window_s: float
) -> tuple[Judgement, str]:
    """Returns the verdict on a request, and the reason for a bad one.

    A retriable error is excused within ``window_s`` seconds after the loss of a Router or an Ingress, if the
    last attempt succeeds. What was received must be the reference's beginning, however it ended.
    """
    for attempt in attempts:
        if (what := difference(attempt.output, reference)) is not None:
            return Judgement.WRONG, what
    last = attempts[-1]
    for attempt in attempts:
        if attempt.end is End.ERROR:
            return Judgement.FAILED, attempt.reason
        if attempt.end is End.RETRIABLE and not is_excused(attempt.ended_s, deaths_s, window_s):
            return Judgement.FAILED, f"no Router or Ingress was lost: {attempt.reason}"
    if last.end is End.RETRIABLE:
        return Judgement.FAILED, f"the last attempt too: {last.reason}"
    if last.end is End.CANCELLED:
        return Judgement.CANCELLED, ""
    return (Judgement.OK if len(attempts) == 1 else Judgement.RETRIED), ""


def is_excused(at_s: float, deaths_s: Sequence[float], window_s: float) -> bool:
    """True if a Router or an Ingress was lost at most ``window_s`` seconds before."""
    return any(0 <= at_s - death_s <= window_s for death_s in deaths_s)


class Ledger:
    """All requests of a soak: failures are kept, the others counted."""

    def __init__(self) -> None:
        self._counts: Counter[Judgement] = Counter()
        self._ways: Counter[Way] = Counter()
        self._bad: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self._counts[entry.verdict] += 1
        self._ways[entry.way] += 1
        if entry.verdict in (Judgement.FAILED, Judgement.WRONG):
            self._bad.append(entry)

    def count(self, verdict: Judgement) -> int:
        return self._counts[verdict]

    @property
    def num_requests(self) -> int:
        return self._counts.total()

    @property
    def counts(self) -> dict[str, int]:
        return {verdict.value: self._counts[verdict] for verdict in Judgement}

    @property
    def ways(self) -> dict[str, int]:
        return {way.value: self._ways[way] for way in Way}

    @property
    def bad(self) -> tuple[Entry, ...]:
        return tuple(self._bad)
