"""Tests of the dashboard: every panel asks for metrics and labels that some replica really has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specray.serving.metrics import IngressMetrics
from specray.telemetry import counters as counts
from specray.telemetry.draft import DraftMetrics
from specray.telemetry.metrics import RouterMetrics

PATH = Path(__file__).resolve().parents[2] / "helm" / "specray" / "dashboards" / "specray.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
SCRAPED = {"ray_io_cluster"}
"""Labels that the scraper adds."""
REPLICA = {"application", "deployment", "replica"}
"""Labels that every replica adds; an end-to-end test sees them."""
WORD = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
KEYWORDS = {"on", "ignoring", "group_left", "group_right", "by", "without", "and", "or", "unless", "bool"}


def existing() -> dict[str, set[str]]:
    """Returns labels by the names of samples that a scrape may hold."""
    names = {}
    for metrics in (RouterMetrics(), DraftMetrics(), IngressMetrics()):
        registry = metrics.registry
        for family in registry.collect():
            collector = registry._names_to_collectors[family.name]
            ours = (counts.Counter, counts.LabelledCounter, counts.Histogram)
            names_of = "label_names" if isinstance(collector, ours) else "_labelnames"
            labels = REPLICA | set(getattr(collector, names_of))
            for suffix in SUFFIXES[family.type]:
                names[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return names


def asked(expression: str) -> tuple[set[str], set[str]]:
    """Returns metric names and labels in a PromQL expression."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    labels = set(re.findall(rf"({WORD})\s*(?:=~|!~|!=|=)", bare))
    groupings = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
    for grouping in re.findall(groupings, bare):
        labels |= set(re.findall(WORD, grouping))
    bare = re.sub(groupings, " ", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    return set(re.findall(rf"\b({WORD})\b(?!\s*\()", bare)) - KEYWORDS, labels


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads(PATH.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize(
    ("expression", "names", "labels"),
    [
        ("sum(rate(a_total[5m])) / b", {"a_total", "b"}, set()),
        ('1 + max by (x, y) (a:b{c=~"d"}) / on (e) group_left () f', {"a:b", "f"}, {"x", "y", "c", "e"}),
        (
            "histogram_quantile(0.5, sum by (le) (rate(a_bucket[$__rate_interval])))",
            {"a_bucket"},
            {"le"},
        ),
    ],
)
def test_names_and_labels_of_an_expression(expression: str, names: set[str], labels: set[str]) -> None:
    assert asked(expression) == (names, labels)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_exists(panel: dict[str, Any]) -> None:
    known = existing()
    assert panel["targets"]
    for target in panel["targets"]:
        names, labels = asked(target["expr"])
        assert names
        assert names - known.keys() == set()
        assert labels - SCRAPED <= set().union(*(known[name] for name in names))
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= labels


def test_the_cluster_is_chosen_from_an_existing_metric() -> None:
    variables = {entry["name"]: entry for entry in json.loads(PATH.read_text())["templating"]["list"]}
    (name,) = re.findall(rf"label_values\(({WORD}), ray_io_cluster\)", variables["cluster"]["query"])
    assert name in existing()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    everything = json.loads(PATH.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        (x, y)
        for panel in everything
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
