"""Draws line charts as SVG text: panels over one legend, with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 380, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
"""Margins of a panel around its axes in pixels."""
TITLE_HEIGHT, LEGEND_LINE_HEIGHT, LEGEND_WIDTH = 34, 20, 230


@dataclass(frozen=True, slots=True)
class Series:
    """One series."""

    label: str
    color: str
    is_dashed: bool
    points: tuple[tuple[float, float], ...]
    """Points (x, y) by increasing x; all positive."""
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; x is logarithmic to base 2, with a tick at every x that occurs."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Series, ...]
    is_log_y: bool = False


def draw(title: str, panels: Sequence[Panel], *, num_columns: int) -> str:
    """Draws the panels row by row, and one legend for all below them."""
    num_rows = math.ceil(len(panels) / num_columns)
    width = max(num_columns * PANEL_WIDTH, 2 * LEGEND_WIDTH)
    legend = {line.label: line for panel in panels for line in panel.lines}
    per_row = max(1, width // LEGEND_WIDTH)
    panels_end = TITLE_HEIGHT + num_rows * PANEL_HEIGHT
    height = panels_end + LEGEND_LINE_HEIGHT * (math.ceil(len(legend) / per_row) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 22, title, anchor="middle", size=15),
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, num_columns)
        x, y = column * PANEL_WIDTH, TITLE_HEIGHT + row * PANEL_HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    for index, line in enumerate(legend.values()):
        row, column = divmod(index, per_row)
        left, middle = 20 + column * LEGEND_WIDTH, panels_end + LEGEND_LINE_HEIGHT * (row + 0.5)
        parts.append(_path(line, [(left, middle), (left + 28, middle)]))
        parts.append(_text(left + 36, middle + 4, line.label))
    return "\n".join([*parts, "</svg>"]) + "\n"


def log_ticks(low: float, high: float) -> list[float]:
    """Returns ticks at 1, 2 and 5 times powers of ten that cover ``low`` to ``high``."""
    first = math.floor(math.log10(low))
    candidates = [m * 10.0**e for e in range(first, math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
    start = max(index for index, tick in enumerate(candidates) if tick <= low * (1 + 1e-9))
    end = min(index for index, tick in enumerate(candidates) if tick >= high * (1 - 1e-9))
    return candidates[start : max(end, start + 1) + 1]


def linear_ticks(high: float) -> list[float]:
    """Returns round steps from 0 to the first at or above ``high``."""
    rough = high / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def _panel(panel: Panel) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points if y > 0]
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM
    parts = [_text((LEFT + right) / 2, TOP - 10, panel.title, anchor="middle", size=13)]
    parts.append(_text((LEFT + right) / 2, PANEL_HEIGHT - 8, panel.x_label, anchor="middle"))
    middle = (TOP + bottom) / 2
    label = _text(14, middle, panel.y_label, anchor="middle")
    parts.append(label.replace("<text ", f'<text transform="rotate(-90 14 {middle:g})" '))
    if not ys:
        return [*parts, _text((LEFT + right) / 2, middle, "nothing measured", anchor="middle")]
    ticks = log_ticks(min(ys), max(ys)) if panel.is_log_y else linear_ticks(max(ys))

    def scale(value: float) -> float:
        return math.log(value) if panel.is_log_y else value

    def at_x(x: float) -> float:
        low, high = math.log2(xs[0]), math.log2(xs[-1])
        return LEFT + (right - LEFT) * ((math.log2(x) - low) / (high - low) if high > low else 0.5)

    def at_y(y: float) -> float:
        low, high = scale(ticks[0]), scale(ticks[-1])
        return bottom - (bottom - TOP) * (scale(y) - low) / (high - low)

    for tick in ticks:
        y = at_y(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for x in xs:
        parts.append(f'<path d="M{at_x(x):.1f} {bottom}v5" stroke="black"/>')
        parts.append(_text(at_x(x), bottom + 18, f"{x:g}", anchor="middle"))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>')
    for line in panel.lines:
        points = [(at_x(x), at_y(y)) for x, y in line.points if y > 0]
        parts += [_path(line, points)] if points else []
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>' for x, y in points]
    return parts


def _path(line: Series, points: Sequence[tuple[float, float]]) -> str:
    route = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    width = 3.5 if line.is_bold else 1.5
    return f'<path d="M{route}" fill="none" stroke="{line.color}" stroke-width="{width}"{dashes}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
