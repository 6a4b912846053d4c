"""Draws a timeline as SVG text: a draft and a target lane per session, with the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Final

from specray.bench.core.chart import linear_ticks
from specray.bench.overlap.timeline import (
    ItemSpan,
    Kind,
    Lane,
    Mark,
    Stretch,
    Summary,
    Timeline,
    stretches,
    waits,
)
from specray.router.session.values import FALLBACK
from specray.router.trace import Planned

WIDTH, LEFT, RIGHT = 1480, 78, 26
HEADER, AXIS, LEGEND_LINE, FOOT = 74, 46, 26, 12
SESSION_HEAD, LANE, GAP, SESSION_GAP = 26, 34, 22, 16
"""Heights in pixels: a session's title, one lane, the space between the lanes, the space after a session."""
STRIP, STRIP_GAP = 18, 12
"""Heights in pixels: the strip of decisions for all sessions, the space below it."""
MAX_SESSIONS: Final = 8
_CHAR: Final = 6.3
"""Width of a character at font size 11, in pixels."""
_INK, _MUTED, _GRID, _LANE_COLOR = "#1f2937", "#6b7280", "#e5e7eb", "#f8fafc"
_COLORS: Final[Mapping[Kind, tuple[str, str]]] = MappingProxyType(
    {
        Kind.PREFILL: ("#94a3b8", "white"),
        Kind.PROPOSAL: ("#f59e0b", _INK),
        Kind.USED: ("#10b981", "white"),
        Kind.WASTED: ("#fca5a5", _INK),
        Kind.VERIFY: ("#3b82f6", "white"),
    }
)
"""Colours by kind: of the bar, and of the text on it."""
_HIT, _MISS = "#059669", "#dc2626"
_MODES: Final[Mapping[str, str]] = MappingProxyType(
    {"plain": "#cbd5e1", "ngram": "#ddd6fe", "model": "#a5b4fc"}
)
"""Colours of the strip by mode; an unknown mode is grey."""
_EXPERIMENT_BORDER: Final = f'stroke="{_INK}" stroke-dasharray="4 3"'


@dataclass(frozen=True, slots=True)
class Window:
    start_ns: int
    end_ns: int

    def x(self, ns: int) -> float:
        """Returns the x of a time in pixels; times outside are at the edges."""
        inside = min(max(ns, self.start_ns), self.end_ns)
        return LEFT + (WIDTH - LEFT - RIGHT) * (inside - self.start_ns) / (self.end_ns - self.start_ns)

    def shows(self, start_ns: int, end_ns: int) -> bool:
        return end_ns > self.start_ns and start_ns < self.end_ns


def draw_timeline(timeline: Timeline, summary: Summary, window: Window, *, title: str) -> str:
    """Draws the window's sessions below each other, over one axis in milliseconds since the first item."""
    spans = [span for span in timeline.spans if window.shows(span.asked_ns, span.replied_ns)]
    names = list(dict.fromkeys(span.request_id for span in spans))
    shown = names[:MAX_SESSIONS]
    session_height = SESSION_HEAD + 2 * LANE + GAP + SESSION_GAP
    decided = [stretch for stretch in stretches(timeline) if window.shows(stretch.start_ns, stretch.end_ns)]
    first_top = HEADER + (STRIP + STRIP_GAP if decided else 0)
    bottom = first_top + len(shown) * session_height
    height = bottom + AXIS + (3 if decided else 2) * LEGEND_LINE + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        _HATCH,
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 30, title, size=18, weight="bold"),
        _text(LEFT, 54, _subtitle(summary, len(names) - len(shown)), color=_MUTED, size=13),
        *_axis(window, timeline.start_ns, bottom),
        *_strip(window, decided),
    ]
    for index, request_id in enumerate(shown):
        top = first_top + index * session_height
        parts += _session(timeline, window, request_id, top)
    parts += _legend(bottom + AXIS)
    if decided:
        parts += _modes_legend(bottom + AXIS + 2 * LEGEND_LINE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _subtitle(summary: Summary, num_hidden: int) -> str:
    parts = [
        f"target idle {_percent(summary.target_idle)}",
        f"draft busy {_percent(summary.draft_busy)}",
        f"both at once {_percent(summary.both_busy)}",
        f"{summary.num_tokens / max(1, summary.num_rounds):.2f} tokens a round",
    ]
    if summary.hit_rate is not None:
        parts.append(f"hits {_percent(summary.hit_rate)}")
    if num_hidden:
        parts.append(f"{num_hidden} more sessions are not drawn")
    return "  ·  ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_HATCH: Final = (
    '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff7ed"/>'
    '<path d="M0 0V6" stroke="#fdba74" stroke-width="2"/></pattern></defs>'
)


def _axis(window: Window, origin_ns: int, bottom: float) -> list[str]:
    length_ms = (window.end_ns - window.start_ns) / 1e6
    first_ms = (window.start_ns - origin_ns) / 1e6
    step = linear_ticks(length_ms / 2)[1]
    parts = []
    tick = step * -(-first_ms // step)
    while tick <= first_ms + length_ms + 1e-9:
        x = window.x(origin_ns + round(tick * 1e6))
        parts.append(f'<path d="M{x:.1f} {HEADER}V{bottom - SESSION_GAP + 4}" stroke="{_GRID}"/>')
        parts.append(_text(x, bottom + 6, f"{tick:g}", anchor="middle", color=_MUTED))
        tick += step
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = "milliseconds since the first item left the router"
    return [*parts, _text(middle, bottom + 26, label, anchor="middle", color=_MUTED)]


def _strip(window: Window, decided: Sequence[Stretch]) -> list[str]:
    parts = [_text(LEFT - 12, HEADER + 13, "decided", anchor="end")] if decided else []
    for stretch in decided:
        label = f"{stretch.mode}, experiment" if stretch.is_experiment else stretch.mode
        left, right = window.x(stretch.start_ns), window.x(stretch.end_ns)
        border = f" {_EXPERIMENT_BORDER}" if stretch.is_experiment else ""
        parts.append(
            f'<rect x="{left:.1f}" y="{HEADER}" width="{max(0.8, right - left):.1f}" height="{STRIP}" '
            f'fill="{_MODES.get(stretch.mode, _GRID)}"{border}><title>{escape(label)}</title></rect>'
        )
        for text in (label, stretch.mode):
            if _CHAR * len(text) + 14 <= right - left:
                parts.append(_text((left + right) / 2, HEADER + 13, text, anchor="middle", size=11))
                break
    return parts


def _session(timeline: Timeline, window: Window, request_id: str, top: float) -> list[str]:
    draft_top = top + SESSION_HEAD
    tops = {Lane.DRAFT: draft_top, Lane.TARGET: draft_top + LANE + GAP}
    plan = _plan_at(timeline.plans, request_id, window)
    name = shortened(request_id, 28)
    parts = [_text(LEFT, top + 17, name, weight="bold", size=13)]
    if plan:
        offset = _CHAR * 1.4 * len(name) + 14
        parts.append(_text(LEFT + offset, top + 17, plan, color=_MUTED))
    for lane, y in tops.items():
        parts.append(_text(LEFT - 12, y + LANE / 2 + 4, lane.value, anchor="end"))
        width = WIDTH - LEFT - RIGHT
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="{LANE}" fill="{_LANE_COLOR}"/>')
    for start, end in waits(timeline, request_id):
        if window.shows(start, end):
            parts.append(_rect(window, start, end, tops[Lane.TARGET] + 9, LANE - 18, "url(#wait)"))
    for span in timeline.spans:
        if span.request_id == request_id and window.shows(span.asked_ns, span.replied_ns):
            parts += _span(window, span, tops[span.lane])
    for mark in timeline.marks:
        if mark.request_id == request_id and window.start_ns <= mark.ns <= window.end_ns:
            parts.append(_mark(window, mark, draft_top + LANE + GAP / 2))
    return parts


def _plan_at(plans: Sequence[Planned], request_id: str, window: Window) -> str:
    mine = [plan for plan in plans if plan.request_id == request_id and plan.source != FALLBACK]
    before = [plan for plan in mine if plan.ns <= window.start_ns] or mine[:1]
    return plan_text(before[-1]) if before else ""


def plan_text(plan: Planned) -> str:
    """Describes a plan: ``enumerate, K = 3, F = 2``."""
    if plan.overlap == "off":
        return "off"
    text = f"{plan.overlap}, K = {plan.num_speculative_tokens}"
    return f"{text}, F = {plan.width}" if plan.overlap == "enumerate" else text


def shortened(request_id: str, length: int) -> str:
    """Shortens an id to at most ``length`` characters."""
    return request_id if len(request_id) <= length else f"{request_id[: length - 1]}…"


def _span(window: Window, span: ItemSpan, top: float) -> list[str]:
    fill, ink = _COLORS[span.kind]
    left, right = window.x(span.asked_ns), window.x(span.replied_ns)
    middle = top + LANE / 2
    parts = [f'<path d="M{left:.1f} {middle}H{right:.1f}" stroke="{fill}" stroke-width="2"/>']
    if not window.shows(span.start_ns, span.end_ns):
        return parts
    parts.append(_rect(window, span.start_ns, span.end_ns, top + 4, LANE - 8, fill))
    start, end = window.x(span.start_ns), window.x(span.end_ns)
    for label in _labels(span):
        if _CHAR * len(label) + 14 <= end - start:
            parts.append(_text((start + end) / 2, middle + 4, label, anchor="middle", color=ink, size=11))
            break
    return parts


def _labels(span: ItemSpan) -> list[str]:
    if span.lane is Lane.TARGET:
        told = [f"{span.num_accepted_tokens}/{span.num_draft_tokens}"] if span.num_draft_tokens else []
        return ["prefill", *told] if span.kind is Kind.PREFILL else told
    if span.kind is Kind.PREFILL:
        return ["prefill"]
    if span.kind is Kind.PROPOSAL:
        return [_counted(span.num_draft_tokens, "token"), str(span.num_draft_tokens)]
    return [_counted(span.num_branches, "branch", "branches"), str(span.num_branches)]


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def _mark(window: Window, mark: Mark, y: float) -> str:
    x = window.x(mark.ns)
    title = f"<title>{escape(mark.result)}</title>"
    if mark.is_hit:
        fill = "white" if mark.result == "late_hit" else _HIT
        return (
            f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{fill}" stroke="{_HIT}" stroke-width="1.5">'
            f"{title}</circle>"
        )
    return (
        f'<path d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8" stroke="{_MISS}" stroke-width="2" fill="none">'
        f"{title}</path>"
    )


def _rect(window: Window, start_ns: int, end_ns: int, y: float, height: float, fill: str) -> str:
    left, right = window.x(start_ns), window.x(end_ns)
    width = max(0.8, right - left)
    return f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2" fill="{fill}"/>'


def _legend(top: float) -> list[str]:
    parts = []
    x, y = float(LEFT), top + 6
    for kind, (fill, _) in _COLORS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="22" height="14" rx="2" fill="{fill}"/>')
        parts.append(_text(x + 30, y + 12, kind.value))
        x += 62 + _CHAR * 1.1 * len(kind.value)
    parts.append(f'<rect x="{x}" y="{y}" width="22" height="14" fill="url(#wait)"/>')
    parts.append(_text(x + 30, y + 12, "target waits for the session's next item"))
    x, y = float(LEFT), y + LEGEND_LINE
    middle = y + 7
    signs = (
        (f'<path d="M{{x}} {middle}h22" stroke="{_MUTED}" stroke-width="2"/>', "on its way, or queued"),
        (f'<circle cx="{{c}}" cy="{middle}" r="4.5" fill="{_HIT}"/>', "verdict foreseen"),
        (
            f'<circle cx="{{c}}" cy="{middle}" r="4.5" fill="white" stroke="{_HIT}" stroke-width="1.5"/>',
            "foreseen, told after the verdict",
        ),
        (f'<path d="M{{m}} {middle - 4}l8 8m0 -8l-8 8" stroke="{_MISS}" stroke-width="2"/>', "not foreseen"),
    )
    for sign, label in signs:
        parts.append(sign.format(x=x, c=x + 11, m=x + 7))
        parts.append(_text(x + 30, y + 12, label))
        x += 62 + _CHAR * 1.1 * len(label)
    parts.append(_text(x, y + 12, "2/3: accepted of verified draft tokens", color=_MUTED))
    return parts


def _modes_legend(top: float) -> list[str]:
    parts = []
    x, y = float(LEFT), top + 6
    signs = (
        *((f"all sessions: {mode}", f'fill="{fill}"') for mode, fill in _MODES.items()),
        ("experiment", f'fill="white" {_EXPERIMENT_BORDER}'),
    )
    for label, look in signs:
        parts.append(f'<rect x="{x}" y="{y}" width="22" height="14" {look}/>')
        parts.append(_text(x + 30, y + 12, label))
        x += 62 + _CHAR * 1.1 * len(label)
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    color: str = _INK,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
