"""``specray train eagle3`` and ``medusa``: from a target to a head that is served, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specray.cli.app import run
from specray.engine.features.base import TargetShape
from specray.engine.features.loader import read_layout
from tests.unit.train.heads.runs import TARGET, begin, write_target

SHAPE = TargetShape(TARGET.num_layers, TARGET.hidden_size, TARGET.vocab_size)
TEXT = ["--num-rows", "12", "--rows-per-batch", "12", "--row-len", "112"]
TRAIN = ["--rows-per-step", "2", "--steps", "2"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of so small products wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_command_makes_a_head_that_the_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, work_dir = write_target(tmp_path), begin(tmp_path / "run")
    where = [str(target), "--work-dir", str(work_dir), *TEXT, *TRAIN]
    arguments = ["train", "eagle3", *where, "--num-depths", "2", "--max-vocabulary", "80", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["specray", *arguments])
    assert run(arguments) == 0
    head = work_dir / "eagle3"
    assert f"specray serve --target {target} --drafter {head}\n" in capsys.readouterr().out
    layout = read_layout(str(head), SHAPE)
    assert layout.feature_layers == (1, 2, 3)
    assert json.loads((head / "config.json").read_text())["draft_vocab_size"] <= 80
    assert f"    specray {' '.join(arguments)}\n" in (head / "README.md").read_text("utf-8")
    assert "| place ahead | 1 | 2 |\n" in (head / "README.md").read_text("utf-8")
    written = (work_dir / "written/00000.npz").stat().st_mtime_ns
    assert run(["train", "medusa", *where, "--num-heads", "2"]) == 0
    assert (work_dir / "written/00000.npz").stat().st_mtime_ns == written, "the text is written once"
    assert read_layout(str(work_dir / "medusa"), SHAPE).feature_layers == (4,)


def test_a_run_has_one_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--steps", "2", "--time-budget", "10"]
    assert run(["train", "medusa", str(tmp_path), *both]) == 2
    assert "exactly one of num_steps and time_budget_s" in capsys.readouterr().err
