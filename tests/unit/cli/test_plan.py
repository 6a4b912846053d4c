"""Tests of ``specray plan`` and ``specray profile`` at the command line: output, files and errors."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from specray.cli.plan import parse_ratios
from specray.errors import ConfigError
from specray.planning.profile import Profile, save_profile
from tests.unit.cli.harness import run
from tests.unit.planning.parts import acceptance, draft, target


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    values = Profile(target=target(max_num_seqs=4), draft=draft(), acceptance=(acceptance(0.8),))
    save_profile(values, path)
    return path


def plan(profile_path: Path, *options: object) -> int:
    load = ("--rate", 3, "--prompt", 50, "--output", 20, "--num-requests", 30)
    return run("plan", "--profile", profile_path, *load, "--max-groups", 8, *options)


def test_of_several_models_it_says_which_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, path = tmp_path / "config.yaml", tmp_path / "plan.json"
    config.write_text(
        "models:\n- {name: a, memory_gib: 2}\n- {name: b, memory_gib: 3, load: demand}\n"
        "loading: {memory_gib: 4}\n"
    )
    assert run("plan", config, "--json", path) == 0
    assert "2 models in 4.00 GiB: not all are loaded together" in capsys.readouterr().out
    values: dict[str, Any] = json.loads(path.read_text())
    assert values["loads"][1] == {"model": "b", "gib": 3.0, "gpus": 0.0, "leaving": ["a"], "problem": None}


@pytest.mark.slow
def test_plan_prints_a_table_and_one_sentence(profile_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(profile_path, "--slo-ttft-ms", 500, "--drafts-per-group", "0,0.5,1") == 0
    text = capsys.readouterr().out
    assert "3 requests/s, 50 prompt and 20 output tokens on average, temperature 0" in text
    assert "A: big; B: little" in " ".join(text.split())
    assert "Take 1 target group of 1 x big without drafts: it serves 3 requests/s" in " ".join(text.split())


@pytest.mark.slow
def test_plan_writes_json(profile_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    costs = ("--cost", "big=4", "--cost", "little=0.5")
    assert plan(profile_path, *costs, "--drafts-per-group", "0,1", "--json", path) == 0
    values: dict[str, Any] = json.loads(path.read_text())
    assert [one["drafts_per_group"] for one in values["candidates"]] == [0.0, 1.0]
    assert values["candidates"][1]["devices"] == {"big": 1, "little": 1}
    assert values["candidates"][1]["cost"] == 4.5
    assert values["recommended"]["cost"] == 4.0
    assert values["is_enough"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--drafts-per-group", "0,x"), "--drafts-per-group is '0,x'; allowed: numbers in 0..8"),
        (("--drafts-per-group", "9"), "--drafts-per-group is '9'"),
        (("--prompt", "many"), "--prompt is 'many'; allowed: a number of tokens in 1..1000000"),
        (("--output", "lognormal:9,3"), "--output is 'lognormal:9,3'"),
        (("--cost", "gpu=1"), "--cost gpu: no profile has such hardware; there is: big; little"),
        (("--set", "speculation.overlap=never"), "speculation.overlap"),
        (("--check", "--output", "lognormal:9,20"), "allowed with --check: a number of tokens"),
        (("--check", "--set", "draft.enabled=false"), "has no draft model and the profile one"),
    ],
)
def test_wrong_options_are_refused_on_one_line(
    profile_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert plan(profile_path, *options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("specray: ") and error.count("\n") == 1


def test_plan_without_a_rate_or_with_a_wrong_profile_is_refused(
    profile_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--profile", profile_path) == 2
    assert "--rate is missing" in capsys.readouterr().err
    profile_path.write_text('{"schema_version": 2}')
    assert plan(profile_path) == 2
    assert "target: Field required" in capsys.readouterr().err


def test_profile_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = ("--output", tmp_path / "profile.json")
    assert run("profile", *output, "--set", "draft.model=ngram") == 2
    assert "draft.model is 'ngram'; allowed here: a model, or no draft" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


def test_ratios_are_numbers_and_fractions() -> None:
    assert parse_ratios("0, 0.25,1/3,2") == [Fraction(0), Fraction(1, 4), Fraction(1, 3), Fraction(2)]
    with pytest.raises(ConfigError, match=r"allowed: numbers in 0\.\.8"):
        parse_ratios("1/0")


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_commands_explain_themselves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "Usage:" in capsys.readouterr().out
