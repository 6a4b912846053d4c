"""Tests of llama.cpp's files: what is converted, what is served as it is, and what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from specray.bench.compare.peers import PeerArm, Setup
from specray.bench.compare.peers.llama_cpp import LlamaCpp
from specray.bench.compare.peers.own import Specray
from specray.errors import ConfigError

BASE = """
class TextModel:
    dir_model = None
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "llama-bpe"
        raise NotImplementedError
    def _create_vocab_sentencepiece(self):
        import sentencepiece_that_is_not_installed
"""
CONVERTER = """
import argparse, pathlib
from conversion.base import TextModel
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
parser.add_argument("--outtype")
parser.add_argument("--outfile", type=pathlib.Path)
arguments = parser.parse_args()
model = TextModel()
model.dir_model = arguments.model
if not (arguments.model / "config.json").exists():
    raise SystemExit("there is no config.json")
try:
    model._create_vocab_sentencepiece()
except FileNotFoundError as error:
    missing = pathlib.Path(str(error)).name
names = [model.get_vocab_base_pre(name) for name in ("known", "unknown")]
arguments.outfile.write_text(f"{arguments.outtype} {missing} {names}")
"""


@pytest.fixture
def llama_setup(tmp_path: Path) -> Setup:
    """Makes a directory like llama.cpp's, with a converter of a few lines, and two checkpoints."""
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "base.py").write_text(BASE)
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return Setup(tmp_path / "target", tmp_path / "draft", 1, 64, 1, tmp_path)


LLAMA_ARMS = [PeerArm("llama.cpp", "plain"), PeerArm("llama.cpp", "draft")]


def test_what_no_arm_reads_is_not_converted(llama_setup: Setup) -> None:
    (llama_setup.target / "config.json").rename(llama_setup.target / "other.json")
    peer = LlamaCpp(llama_setup.work_dir, Path("/g/q4.gguf"))
    peer.prepare(llama_setup, [PeerArm("llama.cpp", "plain", None, "gguf")])
    assert not list(llama_setup.work_dir.glob("*.gguf"))


def test_files_of_their_own_bits_are_served_as_they_are(llama_setup: Setup) -> None:
    for path in (llama_setup.target, llama_setup.draft):
        (path / "model.gguf").touch()
    own, peer = Specray(), LlamaCpp(llama_setup.work_dir, llama_setup.target / "model.gguf")
    arms = [PeerArm("llama.cpp", "draft", 3, "gguf"), PeerArm("specray", "serial", None, "gguf")]
    peer.prepare(llama_setup, arms[:1])
    own.prepare(llama_setup, arms[1:])
    assert not list(llama_setup.work_dir.glob("*.gguf"))
    command = peer.launch(arms[0], llama_setup, 1).command
    assert command[command.index("--model") + 1] == str(llama_setup.target / "model.gguf")
    assert command[command.index("--spec-draft-model") + 1] == str(llama_setup.draft / "model.gguf")
    assert not any("weights" in word for word in own.launch(arms[1], llama_setup, 1).command)
    for mode, models in (("serial", ["target", "draft"]), ("ngram", ["target"])):
        command = own.launch(PeerArm("specray", mode), llama_setup, 1).command
        assert [word for word in command if "weights" in word] == [
            f"{name}.weights=bfloat16" for name in models
        ]
    with pytest.raises(ConfigError, match=r"has a GGUF file alone; allowed: arms of llama\.cpp with @gguf$"):
        peer.prepare(llama_setup, LLAMA_ARMS[:1])


def test_own_bits_of_a_checkpoint_without_a_file_are_refused(llama_setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"--arm specray plain gguf: --target .* has no GGUF file$"):
        Specray().prepare(llama_setup, [PeerArm("specray", "plain", None, "gguf")])


@pytest.mark.slow
def test_checkpoints_are_converted_once_and_again_when_they_change(llama_setup: Setup) -> None:
    peer, work_dir = LlamaCpp(llama_setup.work_dir), llama_setup.work_dir
    peer.prepare(llama_setup, LLAMA_ARMS)
    for name in ("target", "draft"):
        text = (work_dir / f"{name}.gguf").read_text()
        # An unknown pre-tokenizer becomes GPT-2's, and sentencepiece is not needed.
        assert text == "bf16 tokenizer.model ['llama-bpe', 'gpt-2']"
        (work_dir / f"{name}.gguf").write_text("kept")
    peer.prepare(llama_setup, LLAMA_ARMS)
    assert (work_dir / "target.gguf").read_text() == "kept"
    later = time.time() + 10
    os.utime(llama_setup.draft / "config.json", (later, later))
    peer.prepare(llama_setup, LLAMA_ARMS)
    assert (work_dir / "target.gguf").read_text() == "kept"
    assert (work_dir / "draft.gguf").read_text().startswith("bf16")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_converted_is_a_config_error(llama_setup: Setup) -> None:
    (llama_setup.target / "config.json").rename(llama_setup.target / "other.json")
    with pytest.raises(
        ConfigError, match=r"target: it cannot be converted to GGUF: there is no config\.json"
    ):
        LlamaCpp(llama_setup.work_dir).prepare(llama_setup, LLAMA_ARMS)
    assert not (llama_setup.work_dir / "target.gguf").exists()
