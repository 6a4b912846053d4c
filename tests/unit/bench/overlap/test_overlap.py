"""Tests of ``specray bench overlap``: arms, table, and one run over the embedded pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specray.bench.core.arm import Arm
from specray.bench.core.turns import Speedup
from specray.bench.overlap.run import (
    OverlapResult,
    lengths_of,
    num_prompts_of,
    overlap_arm,
    overlap_table,
    parse_arm,
)
from specray.cli.app import run
from specray.cli.bench.overlap import cores
from specray.config import parse_config
from specray.errors import ConfigError
from specray.serving.local import pair
from specray.types import Overlap
from tests.unit.engine.processes import forked_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "arm", "name"),
    [
        ("off:0", overlap_arm(0, Overlap.SERIAL), "off"),
        ("serial:3", overlap_arm(3, "serial"), "serial K=3"),
        ("enumerate:2", overlap_arm(2, "enumerate"), "enumerate K=2"),
        ("auto:auto", overlap_arm("auto", "auto"), "auto K=auto"),
        ("serial:auto:auto", overlap_arm("auto", "serial", "auto"), "serial K=auto tree=auto"),
        ("enumerate:4:4x2x1", overlap_arm(4, "enumerate", "4x2x1"), "enumerate K=4 tree=4x2x1"),
    ],
)
def test_arms_are_read_as_they_are_written(text: str, arm: Arm, name: str) -> None:
    assert parse_arm(text) == arm
    assert parse_arm(text).name == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "serial",
        "serial:0",
        "serial:33",
        "serial:-1",
        "serial:simple",
        "off:2",
        "tree:2",
        "auto:x",
        "off:0:8",
    ],
)
def test_other_arms_are_refused_with_those_that_are_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arm(text)
    assert str(caught.value) == (
        f"--arm is {text!r}; allowed: OVERLAP:K with OVERLAP one of serial, ahead, enumerate, auto and K in "
        "1..32 or auto, then :TREE or nothing, or off:0"
    )


@pytest.mark.parametrize("tree", ["", "65", "2x0", "wide"])
def test_trees_that_cannot_be_are_refused(tree: str) -> None:
    with pytest.raises(ConfigError, match=rf"tree is {tree}; allowed: off, auto, a number of nodes 1..64"):
        parse_arm(f"serial:3:{tree}")


def test_cores_are_numbers_with_commas_between() -> None:
    assert cores(None) is None
    assert cores("0,3") == [0, 3]
    with pytest.raises(ConfigError, match="cores are '0-3'; allowed: numbers with commas between"):
        cores("0-3")


def test_hosts_without_a_delay_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "overlap", "--link", "namespaces"]) == 2
    assert "--link is namespaces without --delay-ms" in capsys.readouterr().err


def test_an_arm_changes_speculation_and_nothing_else() -> None:
    config = parse_config({"target": {"max_num_seqs": 3}})
    changed = overlap_arm("auto", "enumerate").config(config)
    assert changed.speculation.num_speculative_tokens == "auto"
    assert changed.speculation.overlap is Overlap.ENUMERATE
    assert changed.target == config.target
    assert changed.speculation.tree == "off"
    assert overlap_arm(4, "serial", "4x2").config(config).speculation.tree == "4x2"


def result(arm: str, tokens_per_s: float, temperature: float = 0.0) -> OverlapResult:
    return OverlapResult(arm, temperature, tokens_per_s, None, 1.0, None, 20.0, None, 1.0)


def test_arms_are_compared_with_the_best_serial_one_of_their_temperature() -> None:
    table = overlap_table(
        [
            result("serial K=2", 80.0),
            result("serial K=3", 100.0),
            result("enumerate K=2", 130.0),
            result("serial K=2", 50.0, 1.0),
            result("enumerate K=2", 60.0, 1.0),
        ]
    )
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["ratio"] == ["0.80", "1.00", "1.30", "1.00", "1.20"]


def test_arms_are_compared_with_those_of_their_own_concurrency() -> None:
    table = overlap_table(
        [
            result("serial K=2", 80.0),
            replace(result("serial K=2", 200.0), concurrency=8),
            replace(result("auto K=auto", 300.0), concurrency=8),
        ]
    )
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["at once"] == ["1", "8", "8"]
    assert cells["ratio"] == ["1.00", "1.00", "1.50"]


def test_several_at_a_time_have_two_prompts_each_at_least_and_end_at_other_times() -> None:
    assert [num_prompts_of(6, places) for places in (1, 2, 3, 4)] == [6, 6, 6, 8]
    assert lengths_of(3, 100, 1) == [100] * 3
    lengths = lengths_of(101, 100, 8)
    assert sorted(lengths) == list(range(50, 151))
    assert lengths[:4] == [50, 87, 124, 60]
    assert lengths_of(2, 1, 4) == [1, 1]


def test_plain_decoding_is_compared_with_pass_by_pass() -> None:
    arms = [result("off", 100.0), replace(result("serial K=2", 130.0), speedup=Speedup(1.3333, 0.0249))]
    table = overlap_table(arms)
    assert list(table.columns[-1].cells) == ["–", "1.33±0.02"]


def test_a_run_reports_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "start_worker", forked_worker)
    file = tmp_path / "overlap.json"
    arms = ["--arm", "off:0", "--arm", "serial:2", "--arm", "enumerate:2"]
    sizes = ["--num-prompts", "2", "--num-repeats", "3", "--max-tokens", "16", "--max-model-len", "256"]
    # What engines measure at their start is of no use where each arm is told its K.
    sizes += ["--set", "target.profile_s=0", "--set", "draft.profile_s=0"]
    sizes += ["--concurrency", "2", "--concurrency", "1"]
    assert run(["bench", "overlap", *arms, *sizes, "--json", str(file)]) == 0
    entries = json.loads(file.read_text())
    assert [entry["concurrency"] for entry in entries] == [2] * 3 + [1] * 3
    results = {entry["arm"]: entry for entry in entries[:3]}
    assert list(results) == ["off", "serial K=2", "enumerate K=2"]
    assert results["off"]["tokens_per_round"] == 1.0
    assert results["off"]["acceptance_rate"] is None
    assert results["off"]["draft_ms"] is None
    assert results["off"]["speedup"] is None
    for name in ("serial K=2", "enumerate K=2"):
        assert 1.0 < results[name]["tokens_per_round"] <= 3.0
        assert results[name]["draft_ms"] > 0.0
        speedup, error = results[name]["speedup"]
        assert speedup > 0.0 and error > 0.0
    assert results["enumerate K=2"]["hit_rate"] is not None
