"""Light checkpoints: which files become one, what is in it, and what becomes of it when its file does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specray.engine.model.checkpoint.gguf_file import PLAIN_TYPES
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.weights.block_type import numbered_type
from specray.errors import ConfigError
from specray.gguf.header import GgufHeader, TensorEntry, read_header
from specray.gguf.light import gguf_weights
from specray.gguf.type_sizes import TYPE_SIZES
from specray.models import fetch
from specray.models.cache import ModelCache
from specray.models.fetch import file_checkpoint, plain_directory
from specray.models.gguf.families import read_config
from specray.models.gguf.light import is_light
from specray.models.listing import list_models, remove_model
from specray.tokenization import load_tokenizer
from specray.tokenization.fingerprint import read_vocabulary
from tests.unit.models.gguf_files.families import MODELS
from tests.unit.models.gguf_files.writer import write_header
from tests.unit.models.tiny_models import CHAT_TEMPLATE, TOKENS, Recorder, write_gguf

WITHOUT_LIBRARY = ("llama", "llama-linear", "llama-llama3", "qwen2", "qwen3", "gemma3", "gemma3-linear")
"""Models whose config.json is read without transformers."""
CUT: dict[str, str | int] = {"tokenizer.ggml.pre": "gpt-2"}


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def config_of(name: str, directory: Path, **keys: Any) -> tuple[GgufHeader, dict[str, Any]]:
    path = write_header(directory / "model.gguf", MODELS[name], header=keys)
    header = read_header(path)
    return header, read_config(path, header)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_light_are_the_models_that_the_decoder_runs(name: str, tmp_path: Path) -> None:
    import transformers

    from specray.engine.model.families.from_library import can_lower

    header, config = config_of(name, tmp_path)
    library: Any = transformers
    expected = can_lower(library.AutoConfig.for_model(**json.loads(json.dumps(config))))
    assert is_light(header, config) == expected
    # One that is read without the library is read the same.
    assert expected or read_decoder_config(config) is None


def test_a_cap_on_logits_needs_the_other_forward(tmp_path: Path) -> None:
    header, config = config_of("gemma3", tmp_path, final_logit_softcapping=30.0)
    assert not is_light(header, config)


@pytest.mark.parametrize("number", TYPE_SIZES)
def test_light_are_files_of_types_that_engines_read(number: int, tmp_path: Path) -> None:
    header, config = config_of("llama", tmp_path)
    odd = GgufHeader(header.values, (*header.tensors, TensorEntry("x", (256,), number, 0)), 0)
    assert is_light(odd, config) == (numbered_type(number) is not None or number in PLAIN_TYPES)


@pytest.mark.parametrize("name", WITHOUT_LIBRARY)
def test_its_configuration_is_read_without_the_library(name: str, tmp_path: Path) -> None:
    _, config = config_of(name, tmp_path)
    assert read_decoder_config(json.loads(json.dumps(config))) is not None


def test_a_file_becomes_a_directory_with_everything_but_the_weights(
    cache: ModelCache, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "my tiny.gguf", values={**CUT, "tokenizer.ggml.eot_token_id": 0})
    listener = Recorder()
    kept = file_checkpoint(path, cache, listener)
    assert sorted(file.name for file in kept.directory.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.gguf",
        "specray.json",
        "specray_vocabulary.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (kept.gguf, kept.problem()) == (path, None)
    assert gguf_weights(kept.directory) == kept.directory / "model.gguf"
    assert kept.size < 100_000
    assert (kept.directory / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    tokenizer = load_tokenizer(kept.directory)
    assert tokenizer.encode("he") == (TOKENS.index("he"),)
    assert tokenizer.eos_token_ids == (0, 1)
    assert read_vocabulary(kept.directory) == {token: index for index, token in enumerate(TOKENS)}
    assert (listener.notices, cache.checkpoints()) == ([], [kept])


def test_a_file_that_was_not_changed_is_not_read_again(
    cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    kept = file_checkpoint(path, cache, Recorder())
    monkeypatch.delattr(fetch, "file_sha256")
    assert file_checkpoint(path, cache, Recorder()) == kept


def test_a_file_that_was_touched_is_compared_and_kept(cache: ModelCache, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    kept = file_checkpoint(path, cache, Recorder())
    os.utime(path, ns=(1, 1))
    assert kept.problem() == "its GGUF file was changed"
    with pytest.raises(ConfigError, match=f"leads to {path}, which was changed after this checkpoint"):
        gguf_weights(kept.directory)
    again = file_checkpoint(path, cache, Recorder())
    assert (again.directory, again.problem()) == (kept.directory, None)
    assert gguf_weights(kept.directory) is not None


def test_a_file_that_was_moved_is_missed_in_one_sentence_and_found_where_it_is(
    cache: ModelCache, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values=CUT)
    kept = file_checkpoint(path, cache, Recorder())
    moved = path.rename(tmp_path / "moved.gguf")
    with pytest.raises(ConfigError, match=f"leads to {path}, which cannot be read .*: it was moved") as error:
        gguf_weights(kept.directory)
    assert "\n" not in str(error.value)
    listener = Recorder()
    assert file_checkpoint(moved, cache, listener).gguf == moved
    assert listener.notices == [
        "the kept checkpoint of tiny is broken (its GGUF file cannot be read: No such file or directory) and "
        "is made again"
    ]


def test_another_file_at_the_same_place_is_another_model(cache: ModelCache, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    first = file_checkpoint(path, cache, Recorder())
    write_gguf(path, seed=1)
    second = file_checkpoint(path, cache, Recorder())
    assert first.sha256 != second.sha256
    with pytest.raises(ConfigError, match="was changed after this checkpoint was made"):
        gguf_weights(first.directory)


def test_a_checkpoint_of_another_version_is_replaced_with_a_word(cache: ModelCache, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values=CUT)
    kept = file_checkpoint(path, cache, Recorder())
    record = json.loads((kept.directory / "specray.json").read_text())
    (kept.directory / "specray.json").write_text(json.dumps({**record, "format": 3}))
    (kept.directory / "model.safetensors").write_bytes(bytes(3_000_000))
    row = list_models(cache)[-1]
    assert (row.name, row.kept_size, row.origin) == (
        kept.directory.name,
        "3 MB",
        "another version of specray",
    )
    listener = Recorder()
    assert file_checkpoint(path, cache, listener) == kept
    assert listener.notices == [f"{kept.directory}, which another version of specray kept, is made again"]
    assert not (kept.directory / "model.safetensors").exists()


def test_a_checkpoint_of_another_version_is_removed_by_its_directory(
    cache: ModelCache, tmp_path: Path
) -> None:
    kept = file_checkpoint(write_gguf(tmp_path / "tiny.gguf"), cache, Recorder())
    (kept.directory / "specray.json").write_text("{}")
    (kept.directory / "model.safetensors").write_bytes(bytes(1_000_000))
    assert remove_model(kept.directory.name, cache, Recorder()) > 1_000_000
    assert not kept.directory.exists()


def test_removing_leaves_the_users_file(cache: ModelCache, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    kept = file_checkpoint(path, cache, Recorder())
    assert list_models(cache)[-1].origin == f"the GGUF file {path}"
    assert remove_model("tiny", cache, Recorder()) == kept.size
    assert path.is_file()
    assert not kept.directory.exists()


def test_a_vocabulary_that_cannot_be_used_is_one_sentence(cache: ModelCache, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values={"tokenizer.ggml.unknown_token_id": 9999})
    with pytest.raises(ConfigError, match="cannot be converted: a special token has the id 9999"):
        file_checkpoint(path, cache, Recorder())
    assert cache.checkpoints() == []


def test_for_training_the_file_is_converted_once_beside_it(
    cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Path] = []

    def fake_convert(gguf: Path, destination: Path, work: Path, listener: Recorder, what: str) -> None:
        sources.append(gguf)
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(bytes(1_000_000))

    monkeypatch.setattr(fetch, "convert", fake_convert)
    path = write_gguf(tmp_path / "tiny.gguf")
    kept = file_checkpoint(path, cache, Recorder())
    before = kept.size
    plain = plain_directory(kept, cache, Recorder())
    assert plain_directory(kept, cache, Recorder()) == plain == kept.directory / "bfloat16"
    assert (sources, kept.size - before, kept.problem()) == ([path], 1_000_000, None)
    assert gguf_weights(kept.directory) is not None
    assert remove_model("tiny", cache, Recorder()) == before + 1_000_000
    assert not plain.exists()
