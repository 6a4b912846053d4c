"""``specray train``: from a target to a head that is served, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from specray.cli.app import run
from specray.cli.train.commands import has_bfloat16
from specray.engine.cpu import isa
from specray.engine.cpu.isa import Isa
from specray.engine.features.base import TargetShape
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.eagle.layout import EagleLayout
from specray.engine.features.loader import read_layout
from tests.unit.train.conftest import one_thread as one_thread
from tests.unit.train.heads.runs import begin, write_target

pytestmark = pytest.mark.slow

SHAPE = TargetShape(3, 32, 259)
TEXT = ["--num-rows", "12", "--rows-per-batch", "12", "--row-len", "112"]
TRAIN = ["--rows-per-step", "2", "--steps", "2"]


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
    assert "| place ahead | 1 | 2 | tokens per round |\n" in (head / "README.md").read_text("utf-8")
    written = (work_dir / "written/00000.npz").stat().st_mtime_ns
    assert run(["train", "medusa", *where, "--num-heads", "2"]) == 0
    assert (work_dir / "written/00000.npz").stat().st_mtime_ns == written, "the text is written once"
    assert read_layout(str(work_dir / "medusa"), SHAPE).feature_layers == (4,)
    assert run(["train", "eagle3", *where, "--parallel", "--num-depths", "3", "--max-vocabulary", "80"]) == 0
    assert f"specray serve --target {target} --drafter {work_dir / 'peagle'}\n" in capsys.readouterr().out
    masked = read_layout(str(work_dir / "peagle"), SHAPE)
    assert isinstance(masked, EagleLayout) and masked.masks is not None
    assert masked.masks.token_id == json.loads((work_dir / "peagle.mask.json").read_text())


def test_block_drafters_and_drafts_with_masks_are_made_by_the_same_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, work_dir = write_target(tmp_path), begin(tmp_path / "run")
    prompts = [{"prompt": f"{domain} {each}", "domain": domain} for domain in ("aa", "bb") for each in (1, 2)]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, prompts)), "utf-8")
    where = [str(target), "--work-dir", str(work_dir), *TEXT, *TRAIN, "--loss", "lk", "--no-chat"]
    where += ["--prompts", str(tmp_path / "prompts"), "--mix", "aa=1,bb=3"]
    assert run(["train", "block", *where, "--num-depths", "4", "--num-layers", "1", "--confidence"]) == 0
    assert f"specray serve --target {target} --drafter {work_dir / 'block'}\n" in capsys.readouterr().out
    layout = read_layout(str(work_dir / "block"), SHAPE)
    assert isinstance(layout, BlockLayout)
    assert (layout.block_size, layout.first_row, len(layout.layers)) == (4, 0, 1)
    assert layout.confidence is not None and layout.feature_layers == (1, 2, 3)
    draft = str(tmp_path / "draft")
    assert run(["train", "pard", *where, "--draft", draft, "--num-depths", "3", "--mask-token", "258"]) == 0
    assert f"specray serve --target {target} --draft {work_dir / 'pard'}\n" in capsys.readouterr().out
    assert json.loads((work_dir / "pard/config.json").read_text())["pard_token"] == 258
    card = (work_dir / "pard/README.md").read_text("utf-8")
    assert "| place ahead | 1 | 2 | 3 | tokens per round |\n" in card and "(LK)" in card
    # Of two rows that are held out, both may be of one domain.
    assert {*np.load(work_dir / "written/00000.npz")["domains"]} == {"aa", "bb"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--mask-token", "259"], "mask_token is 259; allowed: 0..258 but"),
        (["--mask-token", "2"], "mask_token is 2; allowed"),
        (["--mix", "cc=1"], "--mix names 'cc'; allowed: open, first-words, task, text"),
        (["--prompts", "/nowhere"], "--prompts is '/nowhere', which cannot be read"),
        (["--draft", "embedded"], "has another tokenizer than the target"),
    ],
)
def test_what_a_draft_with_masks_cannot_be_made_of_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], problem: str
) -> None:
    target, work_dir = write_target(tmp_path), begin(tmp_path / "run")
    where = [str(target), "--work-dir", str(work_dir), *TEXT, *TRAIN, "--draft", str(tmp_path / "draft")]
    assert run(["train", "pard", *where, *given]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_the_embedded_target_is_trained_for_by_its_name(tmp_path: Path) -> None:
    where = ["--work-dir", str(begin(tmp_path)), *TEXT, *TRAIN]
    assert run(["train", "medusa", "embedded", *where, "--num-heads", "1"]) == 0
    with safe_open(tmp_path / "medusa/medusa_lm_head.safetensors", framework="pt") as file:
        assert file.get_slice("0.0.linear.weight").get_dtype() == "BF16"
    config = json.loads((tmp_path / "medusa/config.json").read_text())
    assert (config["base_model_name_or_path"], config["dtype"]) == ("embedded", "bfloat16")
    card = (tmp_path / "medusa/README.md").read_text("utf-8")
    assert "`specray serve --target embedded --drafter .`" in card
    rows = np.load(tmp_path / "written/00000.npz")["token_ids"]
    assert (rows[:, 0] == 0).all(), "texts begin with <s>"


@pytest.mark.parametrize(
    ("command", "target", "given", "problem"),
    [
        (
            "pard",
            "{path}",
            [],
            "--draft is missing, and the package has no draft for '{path}'; allowed: a draft",
        ),
        ("medusa", "{path}", [], "target '{path}' cannot be loaded by transformers"),
        ("draft", "{path}", [], "target '{path}' cannot be loaded by transformers"),
        ("medusa", "embedded", ["--device", "abacus"], "--device is 'abacus', which cannot be used"),
        ("draft", "embedded", ["--device", "abacus"], "--device is 'abacus', which cannot be used"),
        (
            "medusa",
            "{path}",
            ["--steps", "2", "--time-budget", "10"],
            "exactly one of num_steps and time_budget",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    target: str,
    given: list[str],
    problem: str,
) -> None:
    (path := tmp_path / "empty").mkdir()
    where = [target.format(path=path), "--work-dir", str(tmp_path / "run")]
    assert run(["train", command, *where, *given]) == 2
    assert problem.format(path=path) in " ".join(capsys.readouterr().err.split())
    assert "--device" not in given or not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("device", "isas", "expected"),
    [
        ("cpu", (Isa.AVX2_FMA,), False),
        ("cpu", (Isa.AVX512_BF16, Isa.AVX2_FMA), True),
        ("cuda", (), True),
    ],
)
def test_products_are_bfloat16_where_the_processor_has_them(
    monkeypatch: pytest.MonkeyPatch, device: str, isas: tuple[Isa, ...], expected: bool
) -> None:
    monkeypatch.setattr(isa, "usable_isas", lambda: isas)
    assert has_bfloat16(device) == expected
