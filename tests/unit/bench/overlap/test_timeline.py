"""A trace's timeline: its spans and shares to the nanosecond, its plot, and ``specray bench trace``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specray.bench.overlap.timeline import (
    ItemSpan,
    Kind,
    Lane,
    Mark,
    Stretch,
    Summary,
    Timeline,
    changed_decisions,
    changed_plans,
    make_timeline,
    stretches,
    summarize,
    waits,
)
from specray.bench.overlap.timeline_chart import MAX_SESSIONS, Window, draw_timeline
from specray.cli.app import run
from specray.router.trace import (
    Decided,
    DraftAsked,
    DraftReplied,
    ExperimentEnded,
    LookedUp,
    Planned,
    TraceEvent,
    VerdictReceived,
    VerifySent,
    encode_trace,
)

SVG = "{http://www.w3.org/2000/svg}"
PLAN = Planned(0, "a", "model", "enumerate", 3, 1, "profitable", 1, 0.7, {"off": 50.0, "enumerate": 90.0})
# One session: a prompt; a round whose outcomes hit; one whose outcomes miss, and the proposal that follows.
# The way to the draft and back takes 4, that to the target 2.
EVENTS: list[TraceEvent] = [
    PLAN,
    VerifySent(100, "a", 1, 1, 0, 9, 0),
    DraftAsked(100, "a", 1, 0, 9, 3, (1,)),
    DraftReplied(134, "a", 1, "outcomes", 30, 3, 1, False),
    VerdictReceived(202, "a", 1, 100, "model", 0, 0, 1, "profitable"),
    LookedUp(202, "a", "hit", 3),
    VerifySent(210, "a", 2, 2, 9, 1, 3),
    DraftAsked(210, "a", 2, 9, 1, 3, (2, 1, 1, 1)),
    DraftReplied(254, "a", 2, "outcomes", 40, 15, 5, False),
    VerdictReceived(262, "a", 2, 50, "model", 3, 3, 4, "profitable"),
    LookedUp(262, "a", "hit", 3),
    VerifySent(264, "a", 3, 3, 13, 1, 3),
    DraftAsked(264, "a", 3, 13, 1, 3, (2, 1, 1, 1)),
    VerdictReceived(316, "a", 3, 50, "model", 3, 1, 2, "profitable"),
    DraftReplied(318, "a", 3, "outcomes", 40, 15, 5, False),
    LookedUp(318, "a", "late_miss", 0),
    DraftAsked(318, "a", 4, 15, 2, 3, ()),
    DraftReplied(352, "a", 4, "proposal", 30, 3, 0, False),
    VerifySent(352, "a", 4, 4, 15, 2, 3),
]
# All speculate, twice decided; plain decoding is tried beside it, and then stays.
DECISIONS: list[TraceEvent] = [
    Decided(100, "model", None, 1.5, 1.5, 1),
    Decided(150, "model", None, 1.5, 1.5, 1),
    Decided(200, "model", "plain", 1.5, 1.25, 1),
    ExperimentEnded(260, "model", "plain", "model", 1.5, 0.875),
    Decided(280, "plain", None, 1.5, 0.75, 1),
]


def test_spans_say_who_worked_when_and_for_what() -> None:
    timeline = make_timeline(EVENTS)
    draft, target = Lane.DRAFT, Lane.TARGET
    assert timeline.spans == (
        ItemSpan("a", 1, draft, Kind.PREFILL, 100, 102, 132, 134, 3, 1),
        ItemSpan("a", 1, target, Kind.PREFILL, 100, 101, 201, 202, 0, 0, 0),
        ItemSpan("a", 2, draft, Kind.USED, 210, 212, 252, 254, 15, 5),
        ItemSpan("a", 2, target, Kind.VERIFY, 210, 211, 261, 262, 3, 0, 3),
        ItemSpan("a", 3, target, Kind.VERIFY, 264, 265, 315, 316, 3, 0, 1),
        # Asked at 264, and it came 10 later than the way and the work explain: it waited for its turn.
        ItemSpan("a", 3, draft, Kind.WASTED, 264, 276, 316, 318, 15, 5),
        ItemSpan("a", 4, draft, Kind.PROPOSAL, 318, 320, 350, 352, 3),
    )
    assert timeline.marks == (Mark("a", 202, "hit"), Mark("a", 262, "hit"), Mark("a", 318, "late_miss"))
    assert [mark.is_hit for mark in timeline.marks] == [True, True, False]
    assert (timeline.start_ns, timeline.end_ns) == (100, 352)
    # The last Verify has no verdict yet.
    assert waits(timeline, "a") == [(202, 210), (262, 264)]


def test_shares_are_of_the_time_with_sessions() -> None:
    summary = summarize(make_timeline(EVENTS), EVENTS)
    # The target works 101..201, 211..261, 265..315; the draft 102..132, 212..252, 276..316, 320..350.
    assert summary == Summary(
        active_ns=252,
        target_idle=pytest.approx(1 - 200 / 252),
        draft_busy=pytest.approx(140 / 252),
        both_busy=pytest.approx((30 + 40 + 39) / 252),
        num_rounds=3,
        num_tokens=7,
        num_draft_tokens=6,
        num_accepted_tokens=4,
        lookups={"hit": 2, "late_miss": 1},
        first_token_s=pytest.approx(102e-9),
        later_tokens_per_s=pytest.approx(6 / 114e-9),
        reasons={"profitable": 3},
    )
    assert summary.hit_rate == pytest.approx(2 / 3)


def test_steps_shared_by_sessions_count_once_and_pauses_between_sessions_not_at_all() -> None:
    events: list[TraceEvent] = []
    for start, request_id in ((0, "a"), (0, "b"), (1000, "c")):
        events.append(VerifySent(start, request_id, 1, 1, 0, 5, 0))
        events.append(VerdictReceived(start + 100, request_id, 1, 100, "model", 0, 0, 1, "profitable"))
    summary = summarize(make_timeline(events), events)
    assert (summary.active_ns, summary.target_idle, summary.draft_busy) == (200, 0.0, 0.0)
    assert summary.hit_rate is None


def test_a_prompt_in_chunks_ends_with_the_first_token_and_sessions_without_a_beginning_do_not_count() -> None:
    events: list[TraceEvent] = [
        VerdictReceived(5, "older", 7, 4, "model", 0, 0, 1, "profitable"),
        VerifySent(6, "older", 8, 1, 40, 1, 0),
        VerifySent(10, "a", 1, 2, 0, 8, 0),
        VerdictReceived(30, "older", 8, 20, "model", 0, 0, 1, "profitable"),
        VerdictReceived(40, "a", 1, 20, "model", 0, 0, 0, "profitable"),
        VerifySent(40, "a", 2, 3, 8, 8, 0),
        VerdictReceived(70, "a", 2, 20, "model", 0, 0, 1, "profitable"),
    ]
    summary = summarize(make_timeline(events), events)
    assert (summary.first_token_s, summary.later_tokens_per_s) == (pytest.approx(60e-9), None)
    events += [
        VerifySent(71, "a", 3, 4, 16, 1, 2),
        VerdictReceived(80, "a", 3, 8, "model", 2, 2, 3, "profitable"),
    ]
    assert summarize(make_timeline(events), events).later_tokens_per_s == pytest.approx(3 / 10e-9)


def test_an_empty_trace_has_an_empty_timeline() -> None:
    timeline = make_timeline([])
    assert timeline == Timeline((), (), ())
    assert summarize(timeline, []).target_idle == 0.0


def test_questions_that_the_ring_has_lost_leave_no_span() -> None:
    assert (
        make_timeline([event for event in EVENTS if type(event) not in (DraftAsked, VerifySent)]).spans == ()
    )


def test_plans_are_listed_when_they_change() -> None:
    later = replace(PLAN, ns=5)
    other = replace(PLAN, ns=6, num_speculative_tokens=4)
    back = replace(PLAN, ns=7)
    fallback = replace(PLAN, ns=8, source="fallback")
    second = replace(PLAN, ns=9, request_id="b")
    plans = [PLAN, later, other, back, fallback, second]
    assert changed_plans(make_timeline(plans)) == [PLAN, other, back, fallback, second]


def test_decisions_are_listed_when_they_change_and_with_every_experiment() -> None:
    timeline = make_timeline([*EVENTS, *DECISIONS])
    assert timeline.decisions == tuple(DECISIONS)
    assert changed_decisions(timeline) == [DECISIONS[0], *DECISIONS[2:]]


def test_stretches_of_one_mode_follow_each_other_to_the_end() -> None:
    assert stretches(make_timeline([*EVENTS, *DECISIONS])) == [
        Stretch(100, 200, "model", is_experiment=False),
        Stretch(200, 260, "plain", is_experiment=True),
        Stretch(260, 280, "model", is_experiment=False),
        Stretch(280, 352, "plain", is_experiment=False),
    ]
    assert stretches(make_timeline(EVENTS)) == []


# The plot


def drawn(events: list[TraceEvent], start_ns: int, end_ns: int) -> ElementTree.Element:
    timeline = make_timeline(events)
    text = draw_timeline(timeline, summarize(timeline, events), Window(start_ns, end_ns), title="a & b")
    return ElementTree.fromstring(text)


def labels(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_plot_has_a_bar_for_each_span_and_a_sign_for_each_verdict() -> None:
    root = drawn(EVENTS, 100, 352)
    texts = labels(root)
    shares = "target idle 21 %  ·  draft busy 56 %  ·  both at once 43 %"
    assert texts[:2] == ["a & b", f"{shares}  ·  2.33 tokens a round  ·  hits 67 %"]
    assert "enumerate, K = 3, F = 1" in texts
    assert [text for text in texts if text in ("3/3", "1/3")] == ["3/3", "1/3"]
    assert texts.count("5 branches") == 2 and texts.count("3 tokens") == 1 and texts.count("prefill") == 3
    fills = [element.get("fill") for element in root.iter(f"{SVG}rect")]
    # Two bars and the legend's; one of each kind of the others, and the legend's.
    assert [fills.count(color) for color in ("#94a3b8", "#3b82f6", "#10b981", "#fca5a5", "#f59e0b")] == [
        3, 3, 2, 2, 2
    ]  # fmt: skip
    assert [title.text for title in root.iter(f"{SVG}title")] == ["hit", "hit", "late_miss"]


def test_plot_has_what_all_decided_above_the_sessions() -> None:
    root = drawn([*EVENTS, *DECISIONS], 100, 352)
    strip = [element for element in root.iter(f"{SVG}rect") if element.find(f"{SVG}title") is not None]
    titles = [element.findtext(f"{SVG}title") for element in strip]
    assert titles == ["model", "plain, experiment", "model", "plain"]
    assert [element.get("stroke-dasharray") for element in strip] == [None, "4 3", None, None]
    lefts = [float(element.get("x", "")) for element in strip]
    assert lefts == sorted(lefts) and lefts[0] == 78.0
    # It moves the sessions down, and is not there without decisions.
    heights = [float(plot.get("height", "")) for plot in (root, drawn(EVENTS, 100, 352))]
    assert heights[0] - heights[1] == 30.0 + 26.0
    texts = labels(root)
    assert texts.count("plain, experiment") == 1 and texts.count("plain") == 1
    assert texts[-4:] == [*(f"all sessions: {level}" for level in ("plain", "ngram", "model")), "experiment"]
    assert "decided" in texts and "decided" not in labels(drawn(EVENTS, 100, 352))
    late = [element.text for element in drawn([*EVENTS, *DECISIONS], 290, 352).iter(f"{SVG}title")]
    assert late == ["plain", "late_miss"]


def test_plot_shows_a_mode_that_it_does_not_know() -> None:
    root = drawn([*EVENTS, Decided(100, "other", None, 1.5, 1.5, 1)], 100, 352)
    fills = [
        element.get("fill") for element in root.iter(f"{SVG}rect") if element.find(f"{SVG}title") is not None
    ]
    assert fills == ["#e5e7eb"]


def test_plot_shows_its_window_and_nothing_else() -> None:
    root = drawn(EVENTS, 205, 260)
    assert [title.text for title in root.iter(f"{SVG}title")] == []
    texts = labels(root)
    assert "5 branches" in texts and "3/3" in texts and "1/3" not in texts


def test_plot_names_the_sessions_that_it_leaves_out() -> None:
    events: list[TraceEvent] = []
    for index in range(MAX_SESSIONS + 2):
        events.append(VerifySent(0, f"s{index}", 1, 1, 0, 5, 0))
        events.append(VerdictReceived(100, f"s{index}", 1, 100, "model", 0, 0, 1, "profitable"))
    texts = labels(drawn(events, 0, 100))
    assert texts[1].endswith("2 more sessions are not drawn")
    assert texts.count("target") == MAX_SESSIONS


# The command


def scaled(events: list[TraceEvent]) -> list[TraceEvent]:
    """Microseconds in place of nanoseconds."""
    changed: list[TraceEvent] = []
    for event in events:
        changes = {name: 1000 * getattr(event, name) for name in ("ns", "forward_ns") if hasattr(event, name)}
        changed.append(replace(event, **changes))
    return changed


def test_command_reads_a_trace_and_writes_its_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plot, copy = tmp_path / "in.jsonl", tmp_path / "out.svg", tmp_path / "copy.jsonl"
    source.write_text(encode_trace(scaled([*EVENTS, *DECISIONS])))
    assert run(["bench", "trace", f"--file={source}", f"--svg={plot}", f"--jsonl={copy}"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "target idle",
        "20.6 %",
        "7 / 3",
        "66.7 % of 6",
        "66.7 % of 3",
        "late miss",
        "enumerate, K = 3, F = 1",
        "modes of all sessions",
        "plans by reason",
        "│ profitable │     3 │ 100.0 % │",
        "model, trying plain",
        "tried plain",
        "0.88",
    ):
        assert text in printed, text
    assert copy.read_text() == source.read_text()
    assert ElementTree.fromstring(plot.read_text()).tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--file=FILE", "--url=http://x"],
            "--file and --url are both given; allowed: one of them, or neither",
        ),
        (["--file=FILE", "--start-ms=1"], "--start-ms is 1; allowed: less than 0.252"),
        (["--file=nowhere.jsonl"], "--file nowhere.jsonl: No such file or directory"),
        (["--file=EMPTY"], "the trace has no item with its answer; nothing can be drawn"),
    ],
    ids=["two sources", "late start", "no file", "empty"],
)
def test_command_says_what_is_wrong(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, empty = tmp_path / "in.jsonl", tmp_path / "empty.jsonl"
    source.write_text(encode_trace(scaled(EVENTS)))
    empty.write_text("")
    given = [option.replace("FILE", str(source)).replace("EMPTY", str(empty)) for option in options]
    assert run(["bench", "trace", *given, f"--svg={tmp_path / 'out.svg'}"]) == 2
    assert capsys.readouterr().err == f"specray: {message}\n"
