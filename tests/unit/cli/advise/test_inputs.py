"""Candidates of ``specray advise``: a known target is compared with the draft of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.cli.advise.app import CandidateOptions
from specray.cli.advise.inputs import pairs_of
from specray.cli.models import checkpoints
from specray.cli.models.checkpoints import draft_of
from specray.models.cache import KeptCheckpoint
from specray.models.catalogue import QWEN25_CODER_15B_INSTRUCT, SMOLLM2_135M_INSTRUCT, KnownModel


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known target that is kept already, and its completed draft."""
    checkpoint = KeptCheckpoint(
        tmp_path / "kept", SMOLLM2_135M_INSTRUCT.name, SMOLLM2_135M_INSTRUCT.sha256, {}
    )

    def draft_of(known: KnownModel, target: KeptCheckpoint) -> str:
        assert (known, target) == (SMOLLM2_135M_INSTRUCT, checkpoint)
        return str(tmp_path / "own-draft")

    monkeypatch.setattr(checkpoints, "fetched_checkpoint", lambda source: checkpoint)
    monkeypatch.setattr(checkpoints, "draft_of", draft_of)
    monkeypatch.setattr(checkpoints, "has_int8_kernels", lambda: True)
    monkeypatch.setattr(checkpoints, "has_nvidia_gpu", lambda: False)


def test_a_known_target_is_compared_with_its_own_draft_first(tmp_path: Path) -> None:
    pairs = pairs_of(CandidateOptions("SmolLM2-135M-Instruct"))
    assert {name: pair.draft.model for name, pair in pairs.items()} == {
        "own": str(tmp_path / "own-draft"),
        "ngram": "ngram",
        "suffix": "suffix",
        "lookahead": "lookahead",
    }
    assert {pair.target.model for pair in pairs.values()} == {str(tmp_path / "kept")}


def test_keys_of_the_own_draft(tmp_path: Path) -> None:
    pairs = pairs_of(CandidateOptions("smollm2-135m-instruct", ["own", "own@quantization=int4"]))
    assert {name: (pair.draft.model, pair.draft.quantization) for name, pair in pairs.items()} == {
        "own": (str(tmp_path / "own-draft"), "int8"),
        "own@quantization=int4": (str(tmp_path / "own-draft"), "int4"),
    }


def test_a_known_target_whose_draft_is_a_known_model_is_compared_with_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(known: KnownModel) -> KeptCheckpoint:
        return KeptCheckpoint(tmp_path / known.name, known.name, known.sha256, {})

    monkeypatch.setattr(checkpoints, "fetch_sources", lambda sources: None)
    monkeypatch.setattr(checkpoints, "fetched_checkpoint", fetched)
    monkeypatch.setattr(checkpoints, "draft_of", draft_of)
    pairs = pairs_of(CandidateOptions(QWEN25_CODER_15B_INSTRUCT.name))
    assert {name: pair.draft.model for name, pair in pairs.items()} == {
        "own": str(tmp_path / "qwen2.5-coder-0.5b-instruct"),
        "ngram": "ngram",
        "suffix": "suffix",
        "lookahead": "lookahead",
    }
    assert list(pairs_of(CandidateOptions("qwen2.5-coder-0.5b-instruct"))) == ["ngram", "suffix", "lookahead"]


def test_the_embedded_target_has_the_embedded_draft() -> None:
    pairs = pairs_of(CandidateOptions(None, ["own", "ngram"]))
    assert [pair.draft.model for pair in pairs.values()] == ["embedded", "ngram"]
