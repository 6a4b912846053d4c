"""Tests of a comparison's report, to the letter, and of its plots."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specray.bench.compare.journal import PassRow
from specray.bench.compare.report import (
    CompareReport,
    latency_chart,
    markdown,
    throughput_chart,
    write_report,
)
from specray.bench.core.chart import Panel, Series, draw, linear_ticks, log_ticks

SVG = "{http://www.w3.org/2000/svg}"


def row(turn: int, arm: str, concurrency: int, tokens_per_s: float, **other: float) -> PassRow:
    values = {"ttft_ms": 10.0, "itl_ms": 4.0, "tpot_ms": 2.0, "num_failed": 0, "num_short": 0} | other
    return PassRow(
        turn=turn,
        system=arm.split()[0],
        arm=arm,
        temperature=values.pop("temperature", 0.0),
        concurrency=concurrency,
        tokens_per_s=tokens_per_s,
        acceptance_rate=values.pop("rate", None),
        mean_acceptance_length=values.pop("length", None),
        num_requests=4,
        **values,  # type: ignore[arg-type]
    )


REPORT = CompareReport(
    title="a comparison",
    conditions={"target": "t 12", "threads": 2},
    rows=[
        row(0, "specray plain", 1, 90.0),
        row(0, "specray plain", 4, 200.0, num_failed=1),
        row(0, "specray serial", 1, 200.0, rate=0.5, length=3.0, ttft_ms=30.0),
        row(0, "specray serial", 4, 360.0, rate=0.5, length=3.0),
        row(0, "vllm draft K=4", 1, 125.0, rate=0.75),
        row(0, "vllm draft K=4", 4, 90.0, rate=0.75),
        row(0, "vllm plain", 4, 150.0, num_short=2),
        row(1, "specray serial", 1, 210.0, rate=0.6, length=3.4, ttft_ms=10.0),
        row(2, "specray serial", 1, 300.0, rate=0.7, length=3.8, ttft_ms=12.5, tpot_ms=3.14159),
    ],
    absent={"llama.cpp": "--llama-cpp is not given"},
    failed={"vllm ngram K=4": "it did not start"},
)

MARKDOWN = """\
# a comparison

- target: t 12
- threads: 2

## Temperature 0

Tokens/s by requests at a time:

|  | 1 | 4 |
| --- | ---: | ---: |
| specray plain | 90.0 | 200.0 |
| specray serial | 210.0 | 360.0 |
| vllm draft K=4 | 125.0 | 90.0 |
| vllm plain |  | 150.0 |

The best mode of each, and specray's best over it:

|  | 1 | 4 |
| --- | ---: | ---: |
| specray | 210.0 (serial) | 360.0 (serial) |
| vllm | 125.0 (draft K=4): 1.68x | 150.0 (plain): 2.40x |

Mean TTFT / mean time per output token, ms:

|  | 1 | 4 |
| --- | ---: | ---: |
| specray plain | 10.0 / 2.00 | 10.0 / 2.00 |
| specray serial | 12.5 / 2.00 | 10.0 / 2.00 |
| vllm draft K=4 | 10.0 / 2.00 | 10.0 / 2.00 |
| vllm plain |  | 10.0 / 2.00 |

Acceptance rate / mean acceptance length:

|  | 1 | 4 |
| --- | ---: | ---: |
| specray plain | – | – |
| specray serial | 0.60 / 3.40 | 0.50 / 3.00 |
| vllm draft K=4 | 0.75 / – | 0.75 / – |
| vllm plain |  | – |

## Not measured, or not in full

- llama.cpp is absent: --llama-cpp is not given
- vllm ngram K=4 failed: it did not start
- specray plain, temperature 0, 4 at a time: 1 requests failed
- vllm plain, temperature 0, 4 at a time: 2 outputs ended early

![Throughput](throughput.svg)

![Latency](latency.svg)
"""


def test_markdown_to_the_letter() -> None:
    assert markdown(REPORT) == MARKDOWN


def test_temperatures_have_sections_and_without_a_peer_nothing_is_compared() -> None:
    rows = [row(0, "specray plain", 1, 2.0, temperature=1.0), row(0, "specray plain", 1, 1.0)]
    text = markdown(CompareReport("t", {}, rows, {}, {}))
    assert text.index("## Temperature 0") < text.index("## Temperature 1")
    assert "The best mode" not in text
    assert "Not measured" not in text


def test_an_empty_run_has_a_report_that_says_what_is_absent() -> None:
    text = markdown(CompareReport("t", {}, [], {"vllm": "--vllm-python is not given"}, {}))
    assert "- vllm is absent: --vllm-python is not given" in text


def test_files_are_written_and_json_holds_medians_and_passes(tmp_path: Path) -> None:
    write_report(REPORT, tmp_path)
    assert (tmp_path / "report.md").read_text() == MARKDOWN
    values = json.loads((tmp_path / "report.json").read_text())
    assert len(values["passes"]) == 9
    cell = next(
        cell for cell in values["cells"] if (cell["arm"], cell["concurrency"]) == ("specray serial", 1)
    )
    assert (cell["tokens_per_s"], cell["ttft_ms"], cell["num_turns"]) == (210.0, 12.5, 3)
    assert values["absent"] == {"llama.cpp": "--llama-cpp is not given"}
    assert (tmp_path / "throughput.svg").read_text() == throughput_chart(REPORT)
    assert (tmp_path / "latency.svg").read_text() == latency_chart(REPORT)


# Plots


def points(svg: str) -> list[tuple[float, float]]:
    return [
        (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_throughput_has_a_panel_per_temperature_and_latency_two() -> None:
    both = CompareReport("t", {}, [*REPORT.rows, row(0, "vllm plain", 1, 9.0, temperature=0.7)], {}, {})
    assert len(ElementTree.fromstring(throughput_chart(both)).findall(f"{SVG}g")) == 2
    latency = latency_chart(both)
    assert len(ElementTree.fromstring(latency).findall(f"{SVG}g")) == 4
    assert texts(latency).count("mean TTFT, ms") == 2
    assert len(points(throughput_chart(both))) == 8
    # The legend names every arm once for all panels.
    assert texts(latency).count("vllm plain") == 1


def test_plain_decoding_is_dashed_and_arms_differ_in_colour() -> None:
    paths = ElementTree.fromstring(throughput_chart(REPORT)).findall(f"{SVG}path")
    styles = {(path.attrib["stroke"], "stroke-dasharray" in path.attrib) for path in paths}
    assert len(styles) == 4
    assert sorted(is_dashed for _, is_dashed in styles) == [False, False, True, True]
    # specray's own are the bold ones.
    assert len({path.attrib["stroke"] for path in paths if path.attrib["stroke-width"] == "3.5"}) == 2


def test_plain_decoding_with_other_weights_is_dashed_too() -> None:
    rows = [
        row(0, arm, count, 9.0) for arm in ("specray plain int4", "specray auto int4") for count in (1, 8)
    ]
    paths = ElementTree.fromstring(throughput_chart(CompareReport("t", {}, rows, {}, {}))).findall(
        f"{SVG}path"
    )
    assert {"stroke-dasharray" in path.attrib for path in paths} == {False, True}


def test_points_lie_where_their_values_are() -> None:
    line = Series("a", "#000", False, ((1, 0.0), (2, 50.0), (4, 100.0)))
    drawn = points(draw("t", [Panel("p", "x", "y", (line,))], num_columns=1))
    # y = 0 is on no logarithmic axis and is left out; x = 1, 2, 4 are equally far apart.
    assert drawn == [(214.0, 144.0), (366.0, 34.0)]


def test_logarithmic_axis_puts_equal_ratios_at_equal_distances() -> None:
    line = Series("a", "#000", False, ((1, 1.0), (2, 10.0), (4, 100.0)))
    drawn = points(draw("t", [Panel("p", "x", "y", (line,), True)], num_columns=1))
    assert [y for _, y in drawn] == [254.0, 144.0, 34.0]


def test_text_is_escaped_and_an_empty_panel_says_so() -> None:
    svg = draw("a < b & c", [Panel("p", "x", "y", ())], num_columns=1)
    assert "a < b & c" in texts(svg)
    assert "nothing measured" in texts(svg)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 1.0, [1, 2]),
        (3.0, 40.0, [2, 5, 10, 20, 50]),
        (0.02, 0.1, [0.02, 0.05, 0.1]),
        (900.0, 1100.0, [500, 1000, 2000]),
    ],
)
def test_log_ticks_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("high", "expected"),
    [(100.0, [0, 20, 40, 60, 80, 100]), (551.0, [0, 200, 400, 600]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
def test_linear_ticks_reach_the_highest_value(high: float, expected: list[float]) -> None:
    assert linear_ticks(high) == pytest.approx(expected)
