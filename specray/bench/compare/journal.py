"""A comparison's results so far, in a file with one line per pass, so that a run can be continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PassRow:
    """One arm at one temperature and concurrency, in one turn. Times are means, in milliseconds."""

    turn: int
    system: str
    arm: str
    temperature: float
    concurrency: int
    tokens_per_s: float
    ttft_ms: float | None
    itl_ms: float | None
    """Milliseconds between events that bring text; one event may bring several tokens."""
    tpot_ms: float | None
    """Milliseconds per output token after the first."""
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    num_requests: int
    num_failed: int
    num_short: int
    """Number of outputs with fewer tokens than were asked for."""
    errors: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, str, float, int]:
        """Key of the pass; each is measured once."""
        return self.turn, self.arm, self.temperature, self.concurrency


class Journal:
    """The passes of one run. The first line holds the conditions under which all of them were measured.

    Args:
        path: the file; made if it does not exist.
        conditions: settings that must not change within a run; plain JSON.

    Raises:
        ConfigError: the file was made under other conditions, or is not a journal.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path = path
        self.rows: list[PassRow] = []
        self.conditions: dict[str, Any] = json.loads(json.dumps(conditions))
        if path.exists():
            self._read(self.conditions)
        else:
            self._append({"conditions": self.conditions})

    def add(self, row: PassRow) -> None:
        self.rows.append(row)
        self._append(asdict(row))

    def has(self, turn: int, arm: str, temperature: float, concurrency: int) -> bool:
        return any(row.key == (turn, arm, temperature, concurrency) for row in self.rows)

    def _read(self, conditions: Mapping[str, Any]) -> None:
        try:
            first, *rest = (json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines())
            known = dict(first["conditions"])
            self.rows = [PassRow(**{**row, "errors": tuple(row["errors"])}) for row in rest]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} is not the journal of a comparison: {error}") from None
        changed = [
            name for name in known.keys() | conditions.keys() if known.get(name) != conditions.get(name)
        ]
        if changed:
            name = min(changed)
            raise ConfigError(
                f"--out {self._path.parent} holds a run with {name} = {known.get(name)!r}, this one has "
                f"{conditions.get(name)!r}; allowed: the same to continue it, or another directory"
            )

    def _append(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
