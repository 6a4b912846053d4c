"""The whole of ``specray advise``, over the embedded pair with a few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from specray.cli.app import run
from specray.config import parse_config, read_config_file
from specray.serving.local import pair
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.processes import forked_worker

PROMPTS = {"code": "def fibonacci(n):\n", "words": "value value value value\n"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that have everything imported from the start: here they are measured, not started."""
    monkeypatch.setattr(pair, "start_worker", forked_worker)


def test_embedded_pair_from_prompts_to_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in PROMPTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    out = {name: tmp_path / name for name in ("advice.json", "advice.svg", "advice.yaml")}
    code = run(
        [
            *("advise", "--draft=embedded", "--draft=ngram", "--draft=lookahead", "--tree=2x2"),
            *(f"--prompts={name}={tmp_path / name}" for name in PROMPTS),
            *("--k=1", "--k=2", "--max-tokens=8", "--concurrency=2", "--concurrency=1"),
            *("--temperature=0", "--temperature=1", "--num-passes=1", "--check"),
            *("--set=target.profile_s=0.3", "--set=draft.profile_s=0.3"),
            *(
                f"--json={out['advice.json']}",
                f"--plot={out['advice.svg']}",
                f"--config={out['advice.yaml']}",
            ),
        ]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "ranking at temperature 0" in printed.out
    values = json.loads(out["advice.json"].read_text())
    ranking = {one["name"]: one for one in values["ranking"]}
    assert sorted(ranking) == ["embedded", "embedded:2x2", "lookahead", "ngram", "ngram:2x2"]
    best = [one["predictions"][0]["tokens_per_s"] for one in values["ranking"]]
    assert best == sorted(best, reverse=True)
    assert [one["concurrency"] for one in ranking["ngram"]["predictions"]] == [2, 1]
    own = {(one["temperature"], one["domain"], one["k"]) for one in ranking["embedded"]["likeness"]}
    assert own == {(t, domain, k) for t in (0.0, 1.0) for domain in ("all", "code", "words") for k in (1, 2)}
    assert [(one["temperature"], one["k"]) for one in ranking["embedded"]["rejection"]] == [(1.0, 2)]
    assert ranking["ngram"]["rejection"] == []
    assert ranking["embedded"]["latency_ratio"] > 0 and ranking["ngram"]["latency_ratio"] is None
    assert set(ranking["embedded"]["draft_step_s_by_sequences"]) >= {"1", "2"}
    # A tree has the first chain among its paths, and goes on where that is rejected.
    chain, tree = (
        {(one["temperature"], one["k"]): one["tokens_per_round"] for one in ranking[name]["likeness"]}
        for name in ("embedded", "embedded:2x2")
    )
    assert all(tree[size] >= chain[size] for size in chain)
    assert out["advice.svg"].read_text().startswith("<svg")
    assert sorted(values["measured_speedups"]) == sorted(ranking)
    assert "predicted / measured" in printed.out
    served = read_config_file(out["advice.yaml"])
    assert parse_config(served).target.model == "embedded"
    assert yaml.safe_load(out["advice.yaml"].read_text()) == served


def test_drafter_has_a_target_of_its_own_and_its_trees_their_own_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=3)
    drafter = write(tmp_path / "eagle", *official(eagle3_weights()))
    prompts, out = tmp_path / "prompts.txt", tmp_path / "advice.json"
    prompts.write_text("a b c a b c\n", encoding="utf-8")
    code = run(
        [
            *("advise", f"--target={target}", f"--drafter={drafter}", "--draft=ngram", "--dtype=float32"),
            *(f"--prompts=letters={prompts}", "--max-tokens=12", "--max-model-len=64", "--k=2"),
            *("--temperature=0", "--concurrency=1", "--num-passes=1", f"--json={out}"),
            *("--tree=3x1", "--check", "--set=target.profile_s=0.3"),
        ]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    values = json.loads(out.read_text())
    ranking = {one["name"]: one for one in values["ranking"]}
    assert (
        sorted(ranking) == sorted(values["measured_speedups"]) == ["eagle", "eagle:3x1", "ngram", "ngram:3x1"]
    )
    eagle, tree = ranking["eagle"], ranking["eagle:3x1"]
    assert [(one["k"], one["num_rounds"] > 0) for one in eagle["likeness"]] == [(2, True)]
    assert tree["likeness"][0]["tokens_per_round"] >= eagle["likeness"][0]["tokens_per_round"]
    # Each step of the target has the drafter's work in it, and more of it for a tree.
    for one in (eagle, tree):
        assert one["latency_ratio"] is None and one["draft_step_s_by_sequences"] == {}
    assert ranking["ngram"]["verify_s_by_rows"] == ranking["ngram:3x1"]["verify_s_by_rows"]
    steps = [ranking[name]["verify_s_by_rows"] for name in ("ngram", "eagle", "eagle:3x1")]
    assert all(steps) and steps[0] != steps[1] != steps[2]
