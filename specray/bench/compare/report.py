"""Writes the report of a comparison: Markdown, JSON and two plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.bench.compare.journal import PassRow
from specray.bench.compare.peers.base import PLAIN
from specray.bench.core.chart import Panel, Series, draw
from specray.bench.core.report import DASH, grid_of, markdown_table, number, values_of

OWN = "specray"


_SUMMED = ("num_failed", "num_short")
_MEDIANS = ("tokens_per_s", "ttft_ms", "itl_ms", "tpot_ms", "acceptance_rate", "mean_acceptance_length")


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians over the turns of one arm, temperature and concurrency; None: not reported."""

    system: str
    arm: str
    temperature: float
    concurrency: int
    num_turns: int
    tokens_per_s: float
    ttft_ms: float | None
    itl_ms: float | None
    tpot_ms: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    num_failed: int
    num_short: int


@dataclass(frozen=True, slots=True)
class CompareReport:
    title: str
    conditions: Mapping[str, Any]
    """Models, data, threads and token counts of the run, as plain JSON."""
    rows: Sequence[PassRow]
    absent: Mapping[str, str]
    """Reasons why systems could not be measured, by system."""
    failed: Mapping[str, str]
    """Reasons why arms could not be measured, by arm."""

    @property
    def cells(self) -> list[Cell]:
        """One cell per arm, temperature and concurrency, in the order of the first measurement."""
        groups: dict[tuple[str, float, int], list[PassRow]] = {}
        for row in self.rows:
            groups.setdefault((row.arm, row.temperature, row.concurrency), []).append(row)
        return [_cell(group) for group in groups.values()]


def write_report(report: CompareReport, directory: Path) -> None:
    """Writes report.md, report.json, throughput.svg and latency.svg."""
    files = {
        "report.md": markdown(report),
        "report.json": json.dumps(report_json(report), indent=2) + "\n",
        "throughput.svg": throughput_chart(report),
        "latency.svg": latency_chart(report),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def report_json(report: CompareReport) -> dict[str, Any]:
    values = values_of(report)
    return {**values, "cells": [values_of(cell) for cell in report.cells], "passes": values.pop("rows")}


def markdown(report: CompareReport) -> str:
    """Returns tables of throughput, best modes against each peer's, latency and acceptance."""
    cells = report.cells
    parts = [f"# {report.title}", _conditions(report)]
    for temperature in _temperatures(cells):
        mine = [cell for cell in cells if cell.temperature == temperature]
        parts.append(f"## Temperature {temperature:g}")
        parts.append(
            "Tokens/s by requests at a time:\n\n" + _table(mine, lambda cell: f"{cell.tokens_per_s:.1f}")
        )
        if best := _best_table(mine):
            parts.append("The best mode of each, and specray's best over it:\n\n" + best)
        parts.append("Mean TTFT / mean time per output token, ms:\n\n" + _table(mine, _latency))
        parts.append("Acceptance rate / mean acceptance length:\n\n" + _table(mine, _acceptance))
    if notes := _notes(report, cells):
        parts.append("## Not measured, or not in full\n\n" + "\n".join(f"- {note}" for note in notes))
    parts.append("![Throughput](throughput.svg)\n\n![Latency](latency.svg)")
    return "\n\n".join(parts) + "\n"


def throughput_chart(report: CompareReport) -> str:
    panels = _panels(report, "tokens/s", lambda cell: cell.tokens_per_s)
    return draw(f"{report.title}: tokens/s", panels, num_columns=max(1, len(panels)))


def latency_chart(report: CompareReport) -> str:
    """Plots mean TTFT and mean time per output token over concurrency, one column per temperature."""
    rows = (
        _panels(report, "mean TTFT, ms", lambda cell: cell.ttft_ms, is_log=True),
        _panels(report, "mean time per output token, ms", lambda cell: cell.tpot_ms, is_log=True),
    )
    return draw(f"{report.title}: latency", [*rows[0], *rows[1]], num_columns=max(1, len(rows[0])))


def _cell(group: Sequence[PassRow]) -> Cell:
    def known(name: str) -> list[Any]:
        return [value for row in group if (value := getattr(row, name)) is not None]

    first = group[0]
    medians: dict[str, Any] = {
        name: statistics.median(known(name)) if known(name) else None for name in _MEDIANS
    }
    sums: dict[str, Any] = {name: sum(known(name)) for name in _SUMMED}
    return Cell(first.system, first.arm, first.temperature, first.concurrency, len(group), **medians, **sums)


def _conditions(report: CompareReport) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in report.conditions.items())


def _temperatures(cells: Sequence[Cell]) -> list[float]:
    return sorted({cell.temperature for cell in cells})


def _concurrencies(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.concurrency for cell in cells})


def _table(cells: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    columns = _concurrencies(cells)
    by_key = {(cell.arm, cell.concurrency): text(cell) for cell in cells}
    rows = [
        [arm, *(by_key.get((arm, column), "") for column in columns)]
        for arm in dict.fromkeys(cell.arm for cell in cells)
    ]
    return markdown_table(grid_of("", ["", *map(str, columns)], rows))


def _best_table(cells: Sequence[Cell]) -> str:
    systems = list(dict.fromkeys(cell.system for cell in cells))
    if OWN not in systems or len(systems) < 2:
        return ""
    columns = _concurrencies(cells)
    best = {
        (system, column): max(fitting, key=lambda cell: cell.tokens_per_s)
        for system in systems
        for column in columns
        if (fitting := [cell for cell in cells if (cell.system, cell.concurrency) == (system, column)])
    }
    rows = [
        [system, *(_versus(best.get((system, column)), best.get((OWN, column))) for column in columns)]
        for system in systems
    ]
    return markdown_table(grid_of("", ["", *map(str, columns)], rows))


def _versus(cell: Cell | None, own: Cell | None) -> str:
    if cell is None:
        return ""
    mode = cell.arm.removeprefix(f"{cell.system} ")
    text = f"{cell.tokens_per_s:.1f} ({mode})"
    if own is None or own is cell or not cell.tokens_per_s:
        return text
    return f"{text}: {own.tokens_per_s / cell.tokens_per_s:.2f}x"


def _latency(cell: Cell) -> str:
    return f"{number(cell.ttft_ms, 1)} / {number(cell.tpot_ms, 2)}"


def _acceptance(cell: Cell) -> str:
    if cell.acceptance_rate is None:
        return DASH
    return f"{cell.acceptance_rate:.2f} / {number(cell.mean_acceptance_length, 2)}"


def _notes(report: CompareReport, cells: Sequence[Cell]) -> list[str]:
    notes = [f"{system} is absent: {reason}" for system, reason in report.absent.items()]
    notes += [f"{arm} failed: {reason}" for arm, reason in report.failed.items()]
    for cell in cells:
        where = f"{cell.arm}, temperature {cell.temperature:g}, {cell.concurrency} at a time"
        if cell.num_failed:
            notes.append(f"{where}: {cell.num_failed} requests failed")
        if cell.num_short:
            notes.append(f"{where}: {cell.num_short} outputs ended early")
    return notes


_COLORS = {
    OWN: ("#d62728", "#ff7f0e", "#e377c2", "#8c564b", "#bcbd22", "#7f7f7f", "#c49c94"),
    "vllm": ("#1f77b4", "#17becf", "#3b5bdb", "#74c0fc"),
    "llama.cpp": ("#2ca02c", "#98df8a", "#006d2c", "#66c2a5"),
}


def _panels(
    report: CompareReport, y_label: str, value: Callable[[Cell], float | None], *, is_log: bool = False
) -> list[Panel]:
    cells = report.cells
    styles = _styles(cells)
    panels = []
    for temperature in _temperatures(cells):
        points: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            if cell.temperature == temperature and (y := value(cell)) is not None:
                points.setdefault(cell.arm, []).append((cell.concurrency, y))
        lines = tuple(
            Series(arm, *styles[arm], tuple(sorted(known)), is_bold=arm.startswith(f"{OWN} "))
            for arm, known in points.items()
        )
        panels.append(Panel(f"temperature {temperature:g}", "requests at a time", y_label, lines, is_log))
    return panels


def _styles(cells: Sequence[Cell]) -> dict[str, tuple[str, bool]]:
    styles: dict[str, tuple[str, bool]] = {}
    counts: dict[str, int] = {}
    for cell in cells:
        if cell.arm not in styles:
            family = _COLORS.get(cell.system, ("#9467bd", "#c5b0d5", "#5e3c99"))
            index = counts.get(cell.system, 0)
            counts[cell.system] = index + 1
            styles[cell.arm] = (family[index % len(family)], PLAIN in cell.arm.split())
    return styles
